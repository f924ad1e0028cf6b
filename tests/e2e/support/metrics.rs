//! Reads the text that `/metrics` answers.

use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(crate) struct Metrics {
    samples: Vec<Sample>,
}

#[derive(Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Metrics {
    pub(crate) fn parse(text: &str) -> Metrics {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        Metrics { samples: lines.filter_map(sample).collect() }
    }

    /// Over all samples of this name that carry these labels; 0 when there is none.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.matching(name, labels).map(|sample| sample.value).sum()
    }

    pub(crate) fn has(&self, name: &str, labels: &[(&str, &str)]) -> bool {
        self.matching(name, labels).next().is_some()
    }

    fn matching<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| {
            sample.name == name
                && labels.iter().all(|(k, v)| sample.labels.get(*k).is_some_and(|have| have == v))
        })
    }
}

fn sample(line: &str) -> Option<Sample> {
    let (head, value) = line.rsplit_once(' ')?;
    let (name, labels) = match head.split_once('{') {
        Some((name, labels)) => (name, labels.strip_suffix('}')?),
        None => (head, ""),
    };
    let labels = labels
        .split(',')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.trim_matches('"').to_owned()))
        .collect();
    Some(Sample { name: name.to_owned(), labels, value: value.parse().ok()? })
}
