//! The schemas of a topic: what producers and consumers agree on about its messages.
//!
//! The broker keeps them and compares types. It does not look into definitions: another definition of the same type
//! is a new version, as with Apache Pulsar's strategy ALWAYS_COMPATIBLE.

use gradwire_proto::wire::{Malformed, Reader};
use pulsar::message::proto::{KeyValue, Schema, ServerError, schema::Type};

use super::store::Refused;

/// Most versions of one topic's schema.
const VERSIONS_MAX: usize = 64;
/// Largest schema, with its properties.
const SCHEMA_BYTES_MAX: usize = 128 << 10;

/// All versions, the first one first.
#[derive(Debug, Default)]
pub(super) struct Schemas(Vec<Schema>);

impl Schemas {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// For a data directory: each version.
    pub(super) fn encode(&self) -> impl Iterator<Item = Vec<u8>> {
        self.0.iter().map(|schema| {
            let mut out = schema.r#type.to_le_bytes().to_vec();
            let mut put = |bytes: &[u8]| {
                out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
                out.extend_from_slice(bytes);
            };
            put(schema.name.as_bytes());
            put(&schema.schema_data);
            for property in &schema.properties {
                put(property.key.as_bytes());
                put(property.value.as_bytes());
            }
            out
        })
    }

    /// Reads what [`Schemas::encode`] wrote.
    ///
    /// # Errors
    /// When it is something else.
    pub(super) fn decode(versions: &[Vec<u8>]) -> Result<Self, Malformed> {
        versions.iter().map(|version| decode(version)).collect::<Result<_, _>>().map(Self)
    }

    /// What they cost.
    pub(super) fn bytes(&self) -> usize {
        self.0.iter().map(schema_bytes).sum()
    }

    /// The newest version, or the one that `version` names.
    pub(super) fn get(&self, version: Option<&[u8]>) -> Option<(Vec<u8>, &Schema)> {
        let index = match version.filter(|version| !version.is_empty()) {
            Some(version) => usize::try_from(u64::from_be_bytes(version.try_into().ok()?)).ok()?,
            None => self.0.len().checked_sub(1)?,
        };
        Some((version_bytes(index), self.0.get(index)?))
    }

    /// The version of this schema, added if it is not there.
    ///
    /// # Errors
    /// When its type differs from that of the topic, or a limit is passed.
    pub(super) fn add(&mut self, schema: Schema) -> Result<Vec<u8>, Refused> {
        self.check(&schema)?;
        if let Some(index) = self.0.iter().position(|other| same(other, &schema)) {
            return Ok(version_bytes(index));
        }
        let bytes = schema_bytes(&schema);
        if self.0.len() >= VERSIONS_MAX || bytes > SCHEMA_BYTES_MAX {
            let detail = format!(
                "a topic of the embedded broker has at most {VERSIONS_MAX} versions of its schema, of {SCHEMA_BYTES_MAX} \
                 bytes each; this would be number {} with {bytes} bytes",
                self.0.len() + 1
            );
            return Err(Refused(ServerError::NotAllowedError, detail));
        }
        self.0.push(schema);
        Ok(version_bytes(self.0.len() - 1))
    }

    /// Whether messages of this schema may be on the topic.
    ///
    /// # Errors
    /// When its type differs.
    pub(super) fn check(&self, schema: &Schema) -> Result<(), Refused> {
        match self.0.last() {
            Some(last) if last.r#type != schema.r#type => {
                let name = |schema: &Schema| schema.r#type().as_str_name();
                let detail = format!(
                    "the topic's messages have a schema of type {}, and {} is incompatible with it",
                    name(last),
                    name(schema)
                );
                Err(Refused(ServerError::IncompatibleSchema, detail))
            }
            _ => Ok(()),
        }
    }
}

fn decode(version: &[u8]) -> Result<Schema, Malformed> {
    let mut reader = Reader::new(version);
    let r#type = reader.u32()?.cast_signed();
    let (name, schema_data) = (text(&mut reader)?, sized(&mut reader)?.to_vec());
    let mut properties = Vec::new();
    while reader.remaining() > 0 {
        properties.push(KeyValue { key: text(&mut reader)?, value: text(&mut reader)? });
    }
    Ok(Schema { name, schema_data, r#type, properties })
}

fn sized<'a>(reader: &mut Reader<'a>) -> Result<&'a [u8], Malformed> {
    let count = reader.u32()? as usize;
    reader.bytes(count)
}

fn text(reader: &mut Reader<'_>) -> Result<String, Malformed> {
    let text = str::from_utf8(sized(reader)?).map_err(|_| Malformed("text is not UTF-8"))?;
    Ok(text.to_owned())
}

/// Schema as clients send it; nothing for "just bytes".
pub(super) fn given(schema: Option<Schema>) -> Option<Schema> {
    schema.filter(|schema| schema.r#type != Type::None as i32)
}

fn version_bytes(index: usize) -> Vec<u8> {
    (index as u64).to_be_bytes().to_vec()
}

fn schema_bytes(schema: &Schema) -> usize {
    let properties = schema.properties.iter().map(|property| property.key.len() + property.value.len() + 16);
    schema.name.len() + schema.schema_data.len() + properties.sum::<usize>() + 64
}

fn same(one: &Schema, other: &Schema) -> bool {
    one.r#type == other.r#type && one.schema_data == other.schema_data
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema(kind: Type, data: &str) -> Schema {
        let schema_data = data.as_bytes().to_vec();
        Schema { name: "n".to_owned(), schema_data, r#type: kind as i32, properties: Vec::new() }
    }

    #[test]
    fn equal_schemas_are_one_version_and_other_types_are_refused() {
        let mut schemas = Schemas::default();
        let first = schemas.add(schema(Type::Json, "a")).unwrap();
        assert_eq!(schemas.add(schema(Type::Json, "a")).unwrap(), first);
        let second = schemas.add(schema(Type::Json, "b")).unwrap();
        assert_eq!(schemas.get(Some(&first)).unwrap().1.schema_data, b"a");
        assert_eq!(schemas.get(None).unwrap(), (second, &schema(Type::Json, "b")));
        assert_eq!(schemas.get(Some(&[9; 8])), None);
        let Refused(error, _) = schemas.add(schema(Type::String, "")).unwrap_err();
        assert_eq!(error, ServerError::IncompatibleSchema);
        for number in 2..VERSIONS_MAX {
            schemas.add(schema(Type::Json, &number.to_string())).unwrap();
        }
        schemas.add(schema(Type::Json, "one more")).unwrap_err();
        Schemas::default().add(schema(Type::Json, &"x".repeat(SCHEMA_BYTES_MAX))).unwrap_err();
    }
}
