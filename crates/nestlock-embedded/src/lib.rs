//! Servers for running and testing nestlock with nothing installed.
