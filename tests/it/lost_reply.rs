//! Lost and late answers, doubled and late requests.
