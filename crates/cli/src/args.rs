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
