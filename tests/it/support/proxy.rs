//! A TCP proxy that misbehaves on order.
