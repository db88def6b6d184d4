"""Routes of REST, one noun a module; each has a `router`."""
