//! A configuration of redis-rs in place of a URL.

use nestlock::{
    Credentials, Error, LockClient, LockClientBuilder,
    redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo},
};

use crate::{support::Server, tls};

fn info(of: impl IntoConnectionInfo) -> ConnectionInfo {
    of.into_connection_info().unwrap()
}

fn tcp_tls(port: u16, insecure: bool) -> ConnectionInfo {
    let addr = ConnectionAddr::TcpTls {
        host: "localhost".into(),
        port,
        insecure,
        tls_params: None,
    };
    info("redis://localhost").set_addr(addr)
}

/// The address, the login and the database are taken over, of what was read from a URL or built by
/// hand.
#[tokio::test]
async fn a_configuration_of_redis_rs_connects() {
    let server = Server::start_with(&["--requirepass", "pw"]);
    let (at, socket) = (server.addr(), server.socket());
    let by_hand = RedisConnectionInfo::default()
        .set_username("default")
        .set_password("pw")
        .set_db(3);
    for info in [
        info(format!("redis://:pw@{at}/3")),
        info(("127.0.0.1", at.port())).set_redis_settings(by_hand),
        info(format!("redis+unix://{}?db=3&pass=pw", socket.display())),
    ] {
        let client = LockClient::builder().connect_to(info).await.unwrap();
        let guard = client.mutex("l").unwrap().lock().await.unwrap();
        let mut admin = server.wire();
        admin.call(&["AUTH", "pw"]).unwrap();
        admin.call(&["SELECT", "3"]).unwrap();
        assert_eq!(admin.call(&["EXISTS", "l"]).unwrap().int(), 1);
        guard.unlock().await.unwrap();
    }
}

/// What cannot be taken over is refused before anything is sent.
#[tokio::test]
async fn what_redis_rs_does_not_give_out_is_refused() {
    let login = |login: RedisConnectionInfo| info("redis://localhost:1").set_redis_settings(login);
    let negative = login(RedisConnectionInfo::default().set_db(-1));
    let no_password = login(RedisConnectionInfo::default().set_username("u"));
    for (info, says) in [
        (tcp_tls(1, true), "insecure"),
        (negative, "database"),
        (no_password, "password"),
    ] {
        let error = LockClient::builder().connect_to(info).await.unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { .. }), "{error:?}");
        assert!(error.to_string().contains(says), "{error}");
    }
    let token = || async { Ok::<_, std::io::Error>(Credentials::new("u", "p")) };
    let with_login = info("redis://:pw@localhost:1");
    let error = LockClient::builder()
        .credentials(token)
        .connect_to(with_login)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::InvalidConfig { .. }), "{error:?}");
}

/// TLS is requested, and the certificates come from nestlock's builder.
#[tokio::test]
async fn a_configuration_of_redis_rs_requests_tls() {
    let server = tls::start();
    let port = server.url().rsplit_once(':').unwrap().1.parse().unwrap();
    let connect = |builder: LockClientBuilder| builder.connect_to(tcp_tls(port, false));
    let error = connect(LockClient::builder()).await.unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error:?}");
    let client = connect(server.builder()).await.unwrap();
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    guard.unlock().await.unwrap();
}
