//! `top`: the locks of a server, live, in a terminal.

mod state;
mod view;

use std::{
    io::IsTerminal,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use ratatui::crossterm::event::{self, Event};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc as async_mpsc,
    time::interval,
};

use self::state::{Asked, State};
use crate::{
    Failure,
    args::{Server, Top, Unusable},
    kind::Kind,
    locks,
    ls::{DISCOVER, wanted},
    raw::Raw,
    whose::People,
};

/// No more drawing than that.
const FRAME: Duration = Duration::from_millis(250);

pub(crate) async fn top(server: &Server, top: &Top) -> Result<u8, Failure> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Unusable("top needs a terminal; without one there is `nestlock ls --watch`".into()).into());
    }
    let raw = Raw::connect(server).await?;
    let wanted = wanted(&raw, server, &top.find).await?;
    // raw mode, the other screen, and a panic hook that gives both back
    let mut terminal = ratatui::init();
    let outcome = run(&raw, server, top, &wanted, &mut terminal).await;
    ratatui::restore();
    outcome.map(|()| 0)
}

/// Keys, from a thread of their own: reading blocks. It ends when nobody listens any more, or with the program.
fn keys() -> async_mpsc::UnboundedReceiver<Event> {
    let (tell, told) = async_mpsc::unbounded_channel();
    let (stop, stopped) = mpsc::channel::<()>();
    thread::spawn(move || {
        let _stop = stop;
        while let Ok(event) = event::read() {
            if tell.send(event).is_err() {
                return;
            }
        }
    });
    drop(stopped);
    told
}

async fn run(
    raw: &Raw,
    server: &Server,
    top: &Top,
    wanted: &locks::Wanted,
    terminal: &mut ratatui::DefaultTerminal,
) -> Result<(), Failure> {
    let mut state = State::new(raw_address(server)?, top.read_only, top.interval);
    let (mut keys, mut ended) = (keys(), signal(SignalKind::terminate())?);
    let mut candidates = locks::discover(raw, wanted).await?;
    let (mut discovered, mut met) = (Instant::now(), None::<Instant>);
    let mut refresh = interval(FRAME);
    let mut refreshed = None::<Instant>;
    loop {
        if state.is_dirty() {
            terminal.draw(|frame| view::draw(&mut state, frame))?;
        }
        tokio::select! {
            Some(event) = keys.recv() => match state.take(&event) {
                Some(Asked::Quit) => return Ok(()),
                Some(Asked::Free(name, owner)) => state.say(free(server, &state, &name, &owner).await),
                None => {}
            },
            _ = ended.recv() => return Ok(()),
            _ = refresh.tick() => {
                if state.is_paused() || refreshed.is_some_and(|at| at.elapsed() < state.interval()) {
                    continue;
                }
                if discovered.elapsed() >= DISCOVER {
                    (candidates, discovered) = (locks::discover(raw, wanted).await?, Instant::now());
                }
                let findings = locks::read(raw, wanted, &candidates).await?;
                // dear for the server: only for somebody who is not known, and seldom
                if state.has_strangers(&findings) && met.is_none_or(|at| at.elapsed() >= DISCOVER) {
                    met = Some(Instant::now());
                    state.meet(People::ask(raw).await);
                }
                refreshed = Some(Instant::now());
                state.refresh(findings, discovered.elapsed());
            }
        }
    }
}

/// Frees a lock if the same owner still holds it.
async fn free(server: &Server, state: &State, name: &str, owner: &str) -> String {
    let outcome = async {
        let client = server.connect(None).await?;
        let lock = Kind::of(state.record(name)).lock(&client, name)?;
        let Some(found) = lock.inspect().await? else { return Ok(false) };
        if !found.holders.iter().any(|(holder, _)| holder.as_str() == owner) {
            return Ok(false);
        }
        Ok::<_, Failure>(lock.force_unlock().await?)
    };
    match outcome.await {
        Ok(true) => format!("freed {name}, which {owner} held"),
        Ok(false) => format!("{owner} does not hold {name} any more: nothing was done"),
        Err(error) => format!("{name}: {error}"),
    }
}

/// Where it is, without user and password.
fn raw_address(server: &Server) -> Result<String, Failure> {
    let url = server.url()?;
    let rest = url.split_once("://").map_or(&*url, |(_, rest)| rest);
    Ok(rest.rsplit_once('@').map_or(rest, |(_, address)| address).to_owned())
}
