//! A decision as text: every way with its terms, one line each.

use std::fmt;

use super::{Closed, Decision, Price, Way};

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for price in &self.prices {
            write!(f, "{price}")?;
            if price.way == Way::Route {
                let terms = &self.route;
                write!(
                    f,
                    "; per layer: transport {:.1} us + holder {:.1} us + merge {:.1} us",
                    terms.transport_us, terms.compute_us, terms.merge_us
                )?;
            }
            writeln!(f)?;
        }
        match self.chosen {
            Some(way) => write!(f, "{way}")?,
            None => f.write_str("no action is available")?,
        }
        f.write_str(if self.replicate { ", and another replica would help" } else { "" })
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Price { way, once_us, step_us, total_us, moved_bytes, closed } = self;
        write!(
            f,
            "{way}: setup {once_us:.1} us, per step {step_us:.1} us, total {total_us:.1} us"
        )?;
        write!(f, ", {moved_bytes} bytes")?;
        closed.map_or(Ok(()), |closed| write!(f, "; unavailable: {closed}"))
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::Route => "route",
            Way::Fetch => "fetch",
            Way::Gather => "gather",
            Way::Recompute => "recompute",
        })
    }
}

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Closed::TooSlow => "misses the TBT objective",
            Closed::NoRoom => "no capacity for the rows",
            Closed::HolderFull => "a holder is at its limit of concurrent requests",
            Closed::NoKernel => "a holder has no kernel for the model",
            Closed::Moved => "a selection cannot use rows of another position",
            Closed::NotSelected => "only a selection can be gathered",
            Closed::NoHolder => "no node holds the rows",
        })
    }
}
