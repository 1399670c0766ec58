//! Servers that are down, hang, come back, or say not now.
