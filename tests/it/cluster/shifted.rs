//! Replies that stray, as in `crate::shifted`, where scripts never go together.

use std::time::Duration;

use super::{by_way_of_a_proxy, client, name_at, start};
use crate::shifted::{LIES, builder, now_and_then, theirs, work, works_again};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_reply_that_strays_in_a_cluster_gives_no_lock_to_two() {
    let cluster = start(2, 0).await;
    let proxy = by_way_of_a_proxy(&cluster, 0).await;
    let direct = client(&cluster).await;
    let tag = name_at(&cluster, 0);
    let name = move |name: String| format!("{{{tag}}}{name}");
    let _held = theirs(&direct, &name).await;
    for lie in LIES {
        let client = builder(true).connect(format!("redis-cluster://{}", proxy.addr())).await.unwrap();
        works_again(&client, name("warm".into())).await;
        proxy.rule(now_and_then(lie));
        assert!(work(&client, &name, Duration::from_secs(2)).await > 0, "{lie:?}: the client acquires nothing");
        proxy.pass();
        works_again(&client, name("warm".into())).await;
    }
}
