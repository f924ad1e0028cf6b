//! How findings are told: sections of sentences, tables of measurements; the same as JSON.

use std::fmt;

use serde::Serialize;

#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    pub sections: Vec<Section>,
    pub probes: Vec<Probe>,
}

#[derive(Debug, Serialize)]
pub(super) struct Section {
    pub title: &'static str,
    pub findings: Vec<Finding>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub item: String,
    pub status: FindingStatus,
    /// What is there, or what is missing, what it is good for and how to get it.
    pub detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FindingStatus {
    Good,
    /// It works, and something could be better.
    Advice,
    Absent,
}

/// What one way carried.
#[derive(Debug, Serialize)]
pub(super) struct Probe {
    pub transport: String,
    /// What was going on: how the sides wait, how many writes were outstanding.
    pub conditions: String,
    pub points: Vec<Point>,
}

#[derive(Debug, Serialize)]
pub(super) struct Point {
    pub write_bytes: usize,
    pub outstanding: usize,
    pub gigabytes_per_s: f64,
    pub p50_us: f64,
    pub p99_us: f64,
}

impl Finding {
    pub(super) fn good(item: impl Into<String>, detail: impl Into<String>) -> Finding {
        Finding { item: item.into(), status: FindingStatus::Good, detail: detail.into() }
    }

    pub(super) fn advice(item: impl Into<String>, detail: impl Into<String>) -> Finding {
        Finding { item: item.into(), status: FindingStatus::Advice, detail: detail.into() }
    }

    pub(super) fn absent(item: impl Into<String>, detail: impl Into<String>) -> Finding {
        Finding { item: item.into(), status: FindingStatus::Absent, detail: detail.into() }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for section in &self.sections {
            writeln!(f, "{}", section.title)?;
            for finding in &section.findings {
                let mark = match finding.status {
                    FindingStatus::Good => "  ok ",
                    FindingStatus::Advice => "  !  ",
                    FindingStatus::Absent => "  -  ",
                };
                writeln!(f, "{mark}{:<16} {}", finding.item, finding.detail)?;
            }
            writeln!(f)?;
        }
        for probe in &self.probes {
            writeln!(f, "measured: {}", probe.transport)?;
            writeln!(f, "     {}", probe.conditions)?;
            writeln!(
                f,
                "     {:>10} {:>12} {:>9} {:>9} {:>9}",
                "bytes", "outstanding", "GB/s", "p50 us", "p99 us"
            )?;
            for point in &probe.points {
                writeln!(
                    f,
                    "     {:>10} {:>12} {:>9.3} {:>9.1} {:>9.1}",
                    point.write_bytes,
                    point.outstanding,
                    point.gigabytes_per_s,
                    point.p50_us,
                    point.p99_us,
                )?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_told_in_lines_and_as_json() {
        let points = vec![Point {
            write_bytes: 4096,
            outstanding: 1,
            gigabytes_per_s: 0.5,
            p50_us: 8.0,
            p99_us: 9.0,
        }];
        let report = Report {
            sections: vec![Section {
                title: "host",
                findings: vec![Finding::good("cores", "2"), Finding::absent("hugepages", "none")],
            }],
            probes: vec![Probe { transport: "shm".into(), conditions: "idle".into(), points }],
        };
        let text = report.to_string();
        assert!(text.contains("  ok cores            2\n"), "{text}");
        assert!(text.contains("  -  hugepages        none\n"), "{text}");
        assert!(text.contains("4096            1     0.500       8.0       9.0"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["sections"][0]["findings"][1]["status"], "absent");
        assert_eq!(json["probes"][0]["points"][0]["p50_us"], 8.0);
    }
}
