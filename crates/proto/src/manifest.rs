//! What ranks declare, and how they find out that they declared the same (docs/wire.md, section 5).
//!
//! Every rank sends its [`Manifest`] to every other and runs [`agree()`] on all of them. As that is a pure function
//! of the manifests, all ranks come to the same order of tensors, or to the same fault.

mod agree;
#[cfg(test)]
mod tests;

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::dtype::{Collective, DType, ReduceOp, WireFormat};
use crate::fault::{Fault, FaultKind};
use crate::ids::Rank;
use crate::limits::{
    MANIFEST_BYTES_MAX, TENSOR_DIMENSIONS_MAX, TENSOR_ELEMENTS_MAX, TENSOR_NAME_BYTES_MAX, TENSORS_MAX,
};
use crate::wire::{Malformed, Reader, owned_text, put_text};

pub use agree::agree;

/// Bytes of an encoded declaration without its name and dimensions.
const DECLARATION_BYTES_MIN: usize = 15;

/// One tensor as one rank declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// What the tensor is matched by: 1 to [`TENSOR_NAME_BYTES_MAX`] bytes of UTF-8.
    pub name: String,
    /// Elements along each dimension, at most [`TENSOR_DIMENSIONS_MAX`] of them. `[]` is a scalar.
    pub shape: Vec<u64>,
    /// Type of its elements.
    pub dtype: DType,
    /// What an operation on it does.
    pub collective: Collective,
    /// How contributions are combined. Without meaning where the collective does not reduce, but compared all the
    /// same.
    pub reduce: ReduceOp,
    /// How its elements travel.
    pub wire: WireFormat,
    /// Tensors with a higher one go first. May differ between ranks: rank 0's counts.
    pub priority: i32,
}

impl Declaration {
    /// Number of elements: 1 for a scalar, 0 if any dimension is 0.
    ///
    /// `u64::MAX` where the product does not fit; [`Declaration::check`] refuses that.
    #[must_use]
    pub fn elements(&self) -> u64 {
        if self.shape.contains(&0) {
            return 0;
        }
        self.shape.iter().fold(1, |product: u64, dimension| product.saturating_mul(*dimension))
    }

    /// Checks what one rank can check alone.
    ///
    /// # Errors
    /// A fault of kind `InvalidArgument` that names the tensor: its name is empty or too long, it has too many
    /// dimensions or too many elements.
    pub fn check(&self) -> Result<(), Fault> {
        self.flaw().map_or(Ok(()), |flaw| {
            let detail = match flaw {
                Flaw::NameEmpty => String::from("a tensor needs a name that is not empty"),
                Flaw::NameTooLong => {
                    format!("its name has {} bytes; shorten it to at most {TENSOR_NAME_BYTES_MAX}", self.name.len())
                }
                Flaw::TooManyDimensions => format!(
                    "it has {} dimensions; merge some, at most {TENSOR_DIMENSIONS_MAX} are possible",
                    self.shape.len()
                ),
                Flaw::TooManyElements => format!(
                    "shape {:?} has more than {TENSOR_ELEMENTS_MAX} elements: declare it as several tensors",
                    self.shape
                ),
            };
            Err(Fault::new(FaultKind::InvalidArgument, detail).tensor(self.name.as_str()))
        })
    }

    fn flaw(&self) -> Option<Flaw> {
        if self.name.is_empty() {
            Some(Flaw::NameEmpty)
        } else if self.name.len() > TENSOR_NAME_BYTES_MAX {
            Some(Flaw::NameTooLong)
        } else if self.shape.len() > TENSOR_DIMENSIONS_MAX {
            Some(Flaw::TooManyDimensions)
        } else if self.elements() > TENSOR_ELEMENTS_MAX {
            Some(Flaw::TooManyElements)
        } else {
            None
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let (collective, root) = collective_code(self.collective);
        put_text(out, &self.name, TENSOR_NAME_BYTES_MAX);
        out.extend_from_slice(&[self.dtype as u8, collective, self.reduce as u8, self.wire as u8]);
        out.extend_from_slice(&root.to_le_bytes());
        out.extend_from_slice(&self.priority.to_le_bytes());
        out.push(self.shape.len() as u8);
        for dimension in &self.shape {
            out.extend_from_slice(&dimension.to_le_bytes());
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let name = owned_text(reader, TENSOR_NAME_BYTES_MAX)?;
        let dtype = DType::from_code(reader.u8()?).ok_or(Malformed("element type"))?;
        let collective = reader.u8()?;
        let reduce = ReduceOp::from_code(reader.u8()?).ok_or(Malformed("reduction"))?;
        let wire = WireFormat::from_code(reader.u8()?).ok_or(Malformed("wire format"))?;
        let collective = collective_from(collective, reader.u32()?).ok_or(Malformed("collective"))?;
        let priority = reader.u32()?.cast_signed();
        let dimensions = usize::from(reader.u8()?);
        if dimensions > TENSOR_DIMENSIONS_MAX {
            return Err(Malformed("more dimensions than a tensor can have"));
        }
        let mut shape = Vec::with_capacity(dimensions);
        for _ in 0..dimensions {
            shape.push(reader.u64()?);
        }
        let declaration = Self { name, shape, dtype, collective, reduce, wire, priority };
        match declaration.flaw() {
            None => Ok(declaration),
            Some(Flaw::TooManyElements) => Err(Malformed("more elements than a tensor can have")),
            Some(_) => Err(Malformed("name of a tensor")),
        }
    }
}

/// What is wrong with a declaration by itself.
enum Flaw {
    NameEmpty,
    NameTooLong,
    TooManyDimensions,
    TooManyElements,
}

fn collective_code(collective: Collective) -> (u8, u32) {
    match collective {
        Collective::AllReduce => (1, 0),
        Collective::ReduceScatter => (2, 0),
        Collective::AllGather => (3, 0),
        Collective::Broadcast { root } => (4, root.0),
    }
}

fn collective_from(code: u8, root: u32) -> Option<Collective> {
    match (code, root) {
        (1, 0) => Some(Collective::AllReduce),
        (2, 0) => Some(Collective::ReduceScatter),
        (3, 0) => Some(Collective::AllGather),
        (4, root) => Some(Collective::Broadcast { root: Rank(root) }),
        _ => None,
    }
}

/// All that one rank declares, in the order in which it did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The tensors; no two have the same name.
    pub tensors: Vec<Declaration>,
}

impl Manifest {
    /// Appends the manifest as it travels, or nothing on error.
    ///
    /// # Errors
    /// A fault of kind `InvalidArgument`: a declaration does not [`Declaration::check`], two have the same name, there
    /// are more than [`TENSORS_MAX`], or all together take more than [`MANIFEST_BYTES_MAX`].
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), Fault> {
        self.check()?;
        let start = out.len();
        out.extend_from_slice(&(self.tensors.len() as u32).to_le_bytes());
        for declaration in &self.tensors {
            declaration.encode(out);
            if out.len() - start > MANIFEST_BYTES_MAX {
                out.truncate(start);
                let what = format!(
                    "the declarations of {} tensors take more than {MANIFEST_BYTES_MAX} bytes: shorten their names",
                    self.tensors.len()
                );
                return Err(Fault::new(FaultKind::InvalidArgument, what));
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Fault> {
        if self.tensors.len() > TENSORS_MAX as usize {
            let what = format!("{} tensors are declared; at most {TENSORS_MAX} are possible", self.tensors.len());
            return Err(Fault::new(FaultKind::InvalidArgument, what));
        }
        self.tensors.iter().try_for_each(Declaration::check)?;
        self.duplicate().map_or(Ok(()), |name| {
            let what = "it is declared twice: give every tensor a name of its own";
            Err(Fault::new(FaultKind::InvalidArgument, what).tensor(name))
        })
    }

    /// Reads all of `bytes` as a manifest. Allocates at most in proportion to their number.
    ///
    /// # Errors
    /// [`Malformed`] when it is too long, ends early or late, declares more tensors than its bytes can hold, has a
    /// declaration with an unknown code or past a limit, or declares a name twice.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() > MANIFEST_BYTES_MAX {
            return Err(Malformed("manifest too long"));
        }
        let mut reader = Reader::new(bytes);
        let count = reader.u32()?;
        if count > TENSORS_MAX || count as usize > reader.remaining() / DECLARATION_BYTES_MIN {
            return Err(Malformed("more tensors than a manifest can have"));
        }
        let mut tensors = Vec::with_capacity(count as usize);
        for _ in 0..count {
            tensors.push(Declaration::decode(&mut reader)?);
        }
        reader.finish()?;
        let manifest = Self { tensors };
        if manifest.duplicate().is_some() {
            return Err(Malformed("a tensor declared twice"));
        }
        Ok(manifest)
    }

    fn duplicate(&self) -> Option<&str> {
        let mut names = BTreeSet::new();
        self.tensors.iter().map(|tensor| tensor.name.as_str()).find(|name| !names.insert(*name))
    }
}
