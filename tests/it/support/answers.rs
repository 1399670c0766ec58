//! Reads the replies of a worker process.

use std::{
    io::{BufRead, BufReader},
    process::ChildStdout,
    sync::mpsc::{self, Receiver},
    thread,
};

/// Returns the text after `mark` in each line of a worker, as it arrives. libtest may have started
/// the line, and prints lines of its own.
pub fn marked(output: ChildStdout, mark: &'static str) -> Receiver<String> {
    let (sender, answers) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if let Some((_, answer)) = line.split_once(mark)
                && sender.send(answer.to_owned()).is_err()
            {
                return;
            }
        }
    });
    answers
}
