//! The layer over libfabric's providers `tcp` and `shm`, which need no hardware. Each module holds
//! checks that take a provider, and a test per provider that is named after it.

/// A module of tests that run checks of the file over one provider.
macro_rules! over {
    ($module:ident, $setting:expr, $($check:ident)+) => {
        mod $module {
            use super::*;

            $(#[test]
            fn $check() {
                super::$check($setting);
            })+
        }
    };
}

mod closing;
mod crowds;
mod processes;
mod refusals;
mod support;
mod writes;
