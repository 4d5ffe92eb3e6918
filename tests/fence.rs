//! Fences grow, whatever happens to the store.
