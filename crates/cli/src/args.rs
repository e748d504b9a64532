//! Values that several commands take.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// Shared memory between ranks of one host, TCP between hosts.
    Auto,
    /// Shared memory only: all ranks on one host.
    Shm,
    /// TCP only.
    Tcp,
}

impl Transport {
    /// The name, as flags and `GRADWIRE_TRANSPORT` spell it.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// How values travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Wire {
    /// 4 bytes a value: as they are.
    Fp32,
    /// IEEE half precision: 2 bytes a value.
    Fp16,
    /// bfloat16: 2 bytes a value, the range of fp32.
    Bf16,
}

impl Wire {
    /// The name, as flags and `GRADWIRE_WIRE` spell it.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// How the ranks of the demo meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// They exchange gradients directly.
    Allreduce,
    /// They share no network but the broker's: aggregators add up what they send there as messages.
    Federated,
}

/// What happens to contributions that come after their round was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Late {
    /// They do not count.
    Reject,
    /// They count in the next round.
    Carry,
}

/// Where the control plane runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BrokerChoice {
    /// gradwire's own broker, inside the launcher, for as long as the job runs.
    Embedded,
    /// A broker that runs already, by its `pulsar://` or `pulsar+ssl://` URL.
    Url(String),
}

impl FromStr for BrokerChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let host = text.strip_prefix("pulsar://").or_else(|| text.strip_prefix("pulsar+ssl://"));
        match host {
            _ if text == "embedded" => Ok(Self::Embedded),
            Some(host) if !host.is_empty() && !host.starts_with(':') => Ok(Self::Url(text.to_owned())),
            _ => Err("expected 'embedded' or a URL such as pulsar://broker.example:6650".to_owned()),
        }
    }
}

impl fmt::Display for BrokerChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded => f.pad("embedded"),
            Self::Url(url) => f.pad(url),
        }
    }
}

/// A number of bytes, as people write it: a number, or one with KiB, MiB or GiB.
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let shift = match unit.trim_start() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        unit => return Err(format!("unknown unit '{unit}': write bytes, or use KiB, MiB or GiB, as in 64MiB")),
    };
    let number: usize = digits.parse().map_err(|_| "no number of bytes: write one as in 64MiB".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too much"))
}

/// A time in seconds, as people write it.
pub(crate) fn seconds(text: &str) -> Result<std::time::Duration, String> {
    let number = text.trim().trim_end_matches('s').trim_end();
    let wrong = || format!("'{text}' is no time: write seconds, as in 30 or 0.5");
    let number: f64 = number.parse().map_err(|_| wrong())?;
    // A year is enough for everybody.
    if !(0.0..=31_536_000.0).contains(&number) {
        return Err(wrong());
    }
    Ok(std::time::Duration::from_secs_f64(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_the_runtime_reads() {
        for wire in Wire::value_variants() {
            assert!(wire.as_str().parse::<gradwire_proto::WireFormat>().is_ok(), "{wire}");
        }
        for transport in Transport::value_variants() {
            assert_eq!(Transport::from_str(transport.as_str(), false).as_ref(), Ok(transport));
        }
    }

    #[test]
    fn bytes_and_seconds_are_read_as_people_write_them() {
        for (text, expected) in [("0", 0), ("4096", 4096), ("64 KiB", 64 << 10), ("1GiB", 1 << 30), ("7B", 7)] {
            assert_eq!(bytes(text), Ok(expected));
        }
        for bad in ["", "MiB", "-1", "1.5MiB", "1MB", "99999999999999999999", "99999999999GiB"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
        for (text, milliseconds) in [("30", 30_000), ("0.5", 500), ("2s", 2000), ("0", 0)] {
            assert_eq!(seconds(text).map(|time| time.as_millis()), Ok(milliseconds));
        }
        for bad in ["", "-1", "x", "NaN", "inf", "1e12"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn brokers_are_embedded_or_urls() {
        assert_eq!("embedded".parse(), Ok(BrokerChoice::Embedded));
        for good in ["pulsar://h:6650", "pulsar+ssl://h.example:6651", "pulsar://[::1]:6650"] {
            assert_eq!(good.parse(), Ok(BrokerChoice::Url(good.to_owned())));
        }
        for bad in ["", "Embedded", "h:6650", "http://h:8080", "pulsar://", "pulsar://:6650"] {
            assert!(bad.parse::<BrokerChoice>().is_err(), "{bad}");
        }
    }
}
