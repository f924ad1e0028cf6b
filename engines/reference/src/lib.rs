//! An MLA transformer on the CPU that attaches to a store node like any engine
