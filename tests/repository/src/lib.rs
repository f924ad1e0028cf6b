//! Checks on the repository itself: dependency direction, file sizes, generated files
