//! Sticky keys: which key a message is ordered by, and the hash that decides at which consumer it lands.
//!
//! Both are Apache Pulsar's, so that a client may compute them too: `murmur3_32` with seed 0, without its sign. Of it
//! comes a *slot*: modulo 65536, and 1 instead of 0, where consumers name ranges of slots; modulo 65535, plus 1, where
//! the broker shares them out. Slot 0 stands for "not set" there.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pulsar::message::Metadata;

/// How many slots consumers may name.
pub(super) const SLOTS: u32 = 1 << 16;

/// The hash of the key that a message is ordered by: its ordering key, else its partition key, else what makes it
/// unique. A batch has the key of its envelope, which producers set when all messages in it share one.
pub(super) fn sticky_hash(metadata: &Metadata) -> u32 {
    if let Some(key) = &metadata.ordering_key {
        return hash(key);
    }
    match &metadata.partition_key {
        Some(key) if metadata.partition_key_b64_encoded == Some(true) => match STANDARD.decode(key) {
            Ok(bytes) => hash(&bytes),
            // No client makes such a key. Its text is as good for ordering.
            Err(_) => hash(key.as_bytes()),
        },
        Some(key) => hash(key.as_bytes()),
        None => hash(format!("{}-{}", metadata.producer_name, metadata.sequence_id).as_bytes()),
    }
}

/// `murmur3_32` without its sign, as Java programs use it.
pub(super) fn hash(mut key: &[u8]) -> u32 {
    // Reading from a slice cannot fail.
    murmur3::murmur3_32(&mut key, 0).unwrap_or_default() & 0x7fff_ffff
}

/// The slot of a hash where consumers name ranges of them.
pub(super) fn sticky_slot(hash: u32) -> u16 {
    ((hash % SLOTS) as u16).max(1)
}

/// The slot of a hash where the broker shares them out.
pub(super) fn shared_slot(hash: u32) -> u16 {
    (hash % (SLOTS - 1) + 1) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_apache_pulsar() {
        for (key, expected) in [("k0", 27862), ("k1", 24618), ("k3", 47229), ("shard-0", 31273), ("shard-1", 33850)] {
            assert_eq!(sticky_slot(hash(key.as_bytes())), expected, "{key}");
        }
        assert_eq!((sticky_slot(0), shared_slot(0), shared_slot(65534), shared_slot(65535)), (1, 1, 65535, 1));
    }

    #[test]
    fn the_ordering_key_comes_first_and_encoded_keys_are_decoded() {
        let mut metadata = Metadata { producer_name: "p".to_owned(), sequence_id: 7, ..Default::default() };
        assert_eq!(sticky_hash(&metadata), hash(b"p-7"));
        metadata.partition_key = Some("azA=".to_owned());
        assert_eq!(sticky_hash(&metadata), hash(b"azA="));
        metadata.partition_key_b64_encoded = Some(true);
        assert_eq!(sticky_hash(&metadata), hash(b"k0"));
        metadata.ordering_key = Some(b"o".to_vec());
        assert_eq!(sticky_hash(&metadata), hash(b"o"));
    }
}
