//! Only tests: the libraries of the recipes are built for nothing else.
