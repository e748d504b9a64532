//! How training is going, on standard error: a bar on a terminal, a few plain lines elsewhere.

use std::io::{IsTerminal as _, Write as _};

use indicatif::{ProgressBar, ProgressStyle};

/// Plain lines that one run prints.
const LINES: u32 = 10;

/// Shows steps as they are done.
pub(super) struct Progress {
    steps: u32,
    /// None where standard error is no terminal.
    bar: Option<ProgressBar>,
    lines_shown: u32,
}

impl Progress {
    /// For a run of `steps` steps.
    pub(super) fn new(steps: u32) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(u64::from(steps));
            // A template that does not parse leaves the default style, which does as well.
            if let Ok(style) = ProgressStyle::with_template("training {bar:40} {pos}/{len} steps, {per_sec}, {msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self { steps, bar, lines_shown: 0 }
    }

    /// `step` steps are done; the last one's loss was `loss`.
    pub(super) fn show(&mut self, step: u32, loss: f32) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("loss {loss:.3}"));
            bar.set_position(u64::from(step));
            return;
        }
        let due = line_of(step, self.steps);
        if due > self.lines_shown {
            self.lines_shown = due;
            // Progress that cannot be shown is no reason to stop.
            let _ = writeln!(std::io::stderr(), "step {step}/{}, loss {loss:.3}", self.steps);
        }
    }

    /// Something happened, which is said in a line of its own.
    pub(super) fn tell(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => drop(writeln!(std::io::stderr(), "{line}")),
        }
    }

    /// A function that takes the bar away, for whoever does not own this value.
    pub(super) fn finisher(&self) -> impl FnOnce() + use<> {
        let bar = self.bar.clone();
        move || {
            if let Some(bar) = bar {
                bar.finish_and_clear();
            }
        }
    }
}

/// How many of the plain lines are due after `step` of `steps` steps.
fn line_of(step: u32, steps: u32) -> u32 {
    (u64::from(step) * u64::from(LINES) / u64::from(steps.max(1))) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_prints_at_most_ten_lines_and_the_last_step_is_one() {
        for steps in [1, 3, 10, 11, 600, 100_000] {
            let shown: std::collections::BTreeSet<u32> = (1..=steps).map(|step| line_of(step, steps)).collect();
            assert!(shown.iter().filter(|line| **line > 0).count() <= LINES as usize);
            assert_eq!(line_of(steps, steps), LINES);
            assert!(line_of(steps - 1, steps) < LINES, "the last line comes with the last step");
        }
    }
}
