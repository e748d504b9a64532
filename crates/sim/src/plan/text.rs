//! Plans as text.

use super::Plan;

/// All but the lists, in the order in which people want to read them.
const FIELDS: [&str; 12] = [
    "seed",
    "ranks",
    "steps",
    "recovery",
    "ranks_min",
    "ranks_max",
    "rounds",
    "links",
    "deadline_ms",
    "compute_us",
    "broker_keeps",
    "federated",
];

/// A text that is no plan.
#[derive(Debug)]
pub struct Unreadable(String);

impl std::fmt::Display for Unreadable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "not a plan: {}; `gradwire-sim --seed 1 --print-plan` shows one", self.0)
    }
}

impl std::error::Error for Unreadable {}

impl Plan {
    /// The plan as JSON, with a line for each tensor and each fault.
    #[must_use]
    pub fn to_text(&self) -> String {
        // Every field has a representation in JSON.
        let mut fields = match serde_json::to_value(self) {
            Ok(serde_json::Value::Object(fields)) => fields,
            _ => return String::new(),
        };
        let lists = [fields.remove("tensors"), fields.remove("faults")];
        let mut lines: Vec<String> =
            FIELDS.into_iter().filter_map(|name| Some(format!("  \"{name}\": {}", fields.remove(name)?))).collect();
        for (name, list) in ["tensors", "faults"].into_iter().zip(lists) {
            let entries = list.as_ref().and_then(serde_json::Value::as_array).map_or(&[][..], Vec::as_slice);
            let entries: Vec<String> = entries.iter().map(|entry| format!("\n    {entry}")).collect();
            let end = if entries.is_empty() { "" } else { "\n  " };
            lines.push(format!("  \"{name}\": [{}{end}]", entries.join(",")));
        }
        format!("{{\n{}\n}}\n", lines.join(",\n"))
    }

    /// Reads a plan.
    ///
    /// # Errors
    /// When the text is no plan, or one that cannot be simulated.
    pub fn from_text(text: &str) -> Result<Self, Unreadable> {
        let plan: Self = serde_json::from_str(text).map_err(|error| Unreadable(error.to_string()))?;
        match plan.flaw() {
            None => Ok(plan),
            Some(flaw) => Err(Unreadable(flaw.to_owned())),
        }
    }

    fn flaw(&self) -> Option<&'static str> {
        let ranks_max = gradwire_proto::limits::WORLD_SIZE_MAX;
        if self.ranks == 0 || self.ranks > ranks_max {
            Some("ranks must be 1 to 1024")
        } else if self.ranks_max > ranks_max || self.ranks_min > self.places() {
            Some("ranks_max must be at most 1024, and ranks_min no more than there are places")
        } else if self.rounds == 0 {
            Some("rounds must not be 0")
        } else if self.deadline_ms == 0 {
            Some("deadline_ms must not be 0")
        } else if self.federated.is_some_and(|federated| federated.quorum == 0 || federated.quorum > self.ranks) {
            Some("quorum must be 1 to ranks")
        } else if self.federated.is_some_and(|federated| federated.aggregators == 0 || federated.shard_elements == 0) {
            Some("the federated mode needs aggregators, and shards with elements")
        } else if self.federated.is_some() && self.tensors.first().is_none_or(|tensor| tensor.elements == 0) {
            Some("the federated mode needs a model: a first tensor with elements")
        } else if self.federated.is_some() && !self.broker_keeps {
            Some("the federated mode needs a broker that keeps its topics")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Shape;

    #[test]
    fn plans_are_read_as_they_were_written() {
        for seed in 0..200 {
            let plan = Plan::generate(seed, &Shape::default());
            let text = plan.to_text();
            assert_eq!(Plan::from_text(&text).unwrap(), plan, "{text}");
        }
    }

    #[test]
    fn what_cannot_be_simulated_is_refused() {
        let good = Plan::generate(1, &Shape::default());
        assert!(Plan::from_text(&Plan { ranks: 0, ..good.clone() }.to_text()).is_err());
        assert!(Plan::from_text(&good.to_text().replace("\"seed\"", "\"sead\"")).is_err());
        assert!(Plan::from_text("").is_err());
    }
}
