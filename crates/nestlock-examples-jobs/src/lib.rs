//! No code: the programs are in `examples/`.
