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
                    "; a layer takes {:.1} on the way + {:.1} at the holder + {:.1} to merge",
                    terms.transport_us, terms.compute_us, terms.merge_us
                )?;
            }
            writeln!(f)?;
        }
        match self.chosen {
            Some(way) => write!(f, "{way}")?,
            None => f.write_str("no way is open")?,
        }
        f.write_str(if self.replicate { ", and a replica would pay" } else { "" })
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Price { way, once_us, step_us, total_us, moved_bytes, closed } = self;
        write!(f, "{way}: {once_us:.1} us once, {step_us:.1} a step, {total_us:.1} in all")?;
        write!(f, ", {moved_bytes} bytes")?;
        closed.map_or(Ok(()), |closed| write!(f, "; not open: {closed}"))
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
            Closed::TooSlow => "misses the objective between tokens",
            Closed::NoRoom => "no room for the rows",
            Closed::HolderFull => "a holder answers as many as it may",
            Closed::NoKernel => "a holder has no kernel for the model",
            Closed::Moved => "rows of another offset, under selection",
            Closed::NotSelected => "only a selection is gathered",
            Closed::NoHolder => "nobody has the rows",
        })
    }
}
