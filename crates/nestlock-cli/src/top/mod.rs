//! `top`: shows the locks of a server, live, in a terminal.

mod follow;
mod state;
mod view;

use std::{io::IsTerminal, os::fd::AsFd, sync::mpsc, thread, time::Duration};

use futures_util::{StreamExt, stream::FuturesUnordered};
use nestlock::OwnerId;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ratatui::crossterm::event::{self, Event};
use tokio::{
    sync::{mpsc as async_mpsc, watch},
    time::sleep,
};

use self::{
    follow::{News, follow},
    state::{Asked, State},
};
use crate::{
    args::{Server, Top},
    by_hand::free_of,
    failure::{Failure, Unusable},
    kind::Kind,
    locks::Record,
    ls::wanted,
    raw::Raw,
    search::Wanted,
    signals::Signals,
};

pub(crate) async fn top(server: &Server, top: &Top) -> Result<u8, Failure> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Unusable(
            "top needs a terminal; without one, use `nestlock ls --watch`".into(),
        )
        .into());
    }
    let raw = Raw::connect(server).await?;
    let wanted = wanted(&raw, server, &top.find, view::HOLDERS).await?;
    on_screen(async |terminal| run(raw, server, top, &wanted, terminal).await).await
}

/// Takes over the terminal while `run` runs, and restores it, even after a panic.
async fn on_screen<T>(run: impl AsyncFnOnce(&mut ratatui::DefaultTerminal) -> T) -> T {
    // raw mode, the alternate screen, and a panic hook that restores both
    let mut terminal = ratatui::init();
    let outcome = run(&mut terminal).await;
    // if the terminal is gone, `restore` and the drop of `terminal` would write the error to
    // standard error, which may be that terminal, and panic
    if ratatui::try_restore().is_err() {
        std::mem::forget(terminal);
    }
    outcome
}

/// Key events, read by a separate thread because reading blocks.
///
/// The thread reads only on request: input after the quit key belongs to the shell.
struct Keys {
    ask: mpsc::Sender<()>,
    is_asked: bool,
    told: async_mpsc::UnboundedReceiver<Event>,
}

impl Keys {
    fn listen() -> Self {
        let (ask, asked) = mpsc::channel();
        let (tell, told) = async_mpsc::unbounded_channel();
        thread::spawn(move || {
            while asked.recv().is_ok()
                && let Ok(event) = event::read()
                && tell.send(event).is_ok()
            {}
        });
        Self {
            ask,
            is_asked: false,
            told,
        }
    }

    /// Returns the next event. Returns `None` if the terminal is gone. Cancel safe.
    async fn next(&mut self) -> Option<Event> {
        if !self.is_asked {
            self.ask.send(()).ok()?;
            self.is_asked = true;
        }
        let event = self.told.recv().await;
        self.is_asked = false;
        event
    }
}

/// How often `top` checks whether its terminal is still there.
const LOOK: Duration = Duration::from_millis(500);

/// Waits until the terminal is gone. A process that ignores HUP is not notified, and crossterm's
/// `read` never returns at the end of the terminal: it retries forever.
async fn gone() {
    loop {
        let stdin = std::io::stdin();
        let mut looked = [PollFd::new(stdin.as_fd(), PollFlags::empty())];
        let ends = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
        if poll(&mut looked, PollTimeout::ZERO).is_ok()
            && looked[0].revents().is_some_and(|is| is.intersects(ends))
        {
            return;
        }
        sleep(LOOK).await;
    }
}

async fn run(
    raw: Raw<'_>,
    server: &Server,
    top: &Top,
    wanted: &Wanted,
    terminal: &mut ratatui::DefaultTerminal,
) -> Result<u8, Failure> {
    let mut state = State::new(server.address()?, top.read_only, top.interval);
    state.colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let (mut keys, mut signals) = (Keys::listen(), Signals::listen()?);
    let (pace, paced) = watch::channel(state.pace());
    let (tell, mut news) = async_mpsc::channel(1);
    // concurrent with the keys: a server that hangs must not keep the user from quitting
    let mut following = std::pin::pin!(follow(raw, server, wanted, paced, tell));
    let mut gone = std::pin::pin!(gone());
    let mut frees = FuturesUnordered::new();
    loop {
        if state.is_dirty() {
            terminal.draw(|frame| view::draw(&mut state, frame))?;
        }
        pace.send_if_modified(|pace| std::mem::replace(pace, state.pace()) != *pace);
        tokio::select! {
            event = keys.next() => match event.map(|event| state.take(&event)) {
                None | Some(Some(Asked::Quit)) => return Ok(0),
                Some(Some(Asked::Free { name, record, owner })) => frees.push(free(server, name, record, owner)),
                Some(None) => {}
            },
            signal = signals.stop() => return Ok(128 + signal as u8),
            () = &mut gone => return Ok(0),
            Some(news) = news.recv() => match news {
                // requested before the pause
                News::Locks { .. } if state.is_paused() => {}
                News::Locks { findings, since_discovery, releases } => {
                    state.releases = releases;
                    state.refresh(findings, since_discovery);
                }
                News::People(people) => state.meet(people),
                News::Trouble(why) => state.trouble(why),
            },
            Some(said) = frees.next(), if !frees.is_empty() => state.say(said),
            () = &mut following => {}
        }
    }
}

/// Frees a lock if this owner still holds it. The holds of other owners stay.
async fn free(server: &Server, name: String, record: Record, owner: String) -> String {
    let outcome = async {
        let client = server.connect(None).await?;
        let lock = Kind::of(record).lock(&client, &name)?;
        let Some(found) = lock.inspect().await? else {
            return Ok(false);
        };
        Ok::<_, Failure>(free_of(&lock, &found, &OwnerId::from_value(&*owner)?).await?)
    };
    match outcome.await {
        Ok(true) => format!("freed {name}, which {owner} held"),
        Ok(false) => format!("{owner} no longer holds {name}: nothing was freed"),
        Err(error) => format!("{name}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::{env, process::Command};

    use super::on_screen;

    /// Panics. The test below runs this in a terminal.
    #[tokio::test]
    #[ignore = "it panics"]
    async fn panics_on_screen() {
        on_screen::<()>(async |_| panic!("in the midst of it")).await;
    }

    #[test]
    fn a_panic_gives_the_terminal_back_and_is_read_there() {
        let own = env::current_exe().unwrap();
        let line = format!(
            "'{}' --ignored --exact --nocapture top::tests::panics_on_screen; stty -a",
            own.display()
        );
        let output = Command::new("script")
            .args(["-qec", &line, "/dev/null"])
            .output()
            .expect("script, of bsdutils");
        let told = String::from_utf8_lossy(&output.stdout);
        let (_, after) = told.split_once("\x1b[?1049h").expect("the other screen");
        let (_, after) = after.split_once("\x1b[?1049l").expect("this screen again");
        assert!(
            after.contains("in the midst of it") && after.contains(" icanon"),
            "{told}"
        );
    }
}
