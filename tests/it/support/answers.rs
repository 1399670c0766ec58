//! What a worker process answers.

use std::{
    io::{BufRead, BufReader},
    process::ChildStdout,
    sync::mpsc::{self, Receiver},
    thread,
};

/// What stands behind `mark` in the lines of a worker, as they come: libtest may have begun a line, and has its own.
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
