//! Memory that gradwire moves: every block is an anonymous memory file, so that peers on the same host can map it,
//! and nothing of it is left anywhere when the last process that uses it is gone.

mod available;
mod sys;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;
use crossbeam_queue::{ArrayQueue, SegQueue};
use gradwire_proto::{DType, Fault, FaultKind, RegionKey};

pub use available::bytes as available_memory;
pub use sys::expect_writes;
pub(crate) use sys::{Mapping, PeerMapping};

/// From this size on, a block is checked against what the machine has before its pages are taken: the kernel would hand
/// out pages until it has none, and then kill processes.
const CHECKED_BYTES: usize = 16 << 20;

/// A Rust type that tensors can have.
pub trait Element: Pod + Send + Sync {
    /// Its element type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {
        $(impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}

element!(f32 => F32, f64 => F64, half::f16 => F16, half::bf16 => Bf16, i32 => I32, i64 => I64);

/// A block of memory that transports can read, write and (on the same host) let peers read in place.
///
/// A `Buffer` is the only handle through which safe code reads or writes the block. It starts zeroed and aligned to
/// a page. Dropping it never frees memory that a transport still uses.
#[derive(Debug)]
pub struct Buffer {
    mapping: Arc<Mapping>,
    key: RegionKey,
    len: usize,
    home: Option<Pool>,
}

/// Keeps blocks of one size for reuse, so that neither memory nor registrations churn. Cloning gives another handle
/// to the same pool. Holds at most as many blocks as were ever in use at once.
#[derive(Clone, Debug)]
pub struct Pool {
    len: usize,
    idle: Arc<Idle>,
}

type Block = (Arc<Mapping>, RegionKey);

/// A pool's idle blocks: a few without ever allocating, any number if need be.
#[derive(Debug)]
struct Idle {
    few: ArrayQueue<Block>,
    more: SegQueue<Block>,
}

impl Idle {
    const FEW: usize = 32;

    fn push(&self, block: Block) {
        if let Err(block) = self.few.push(block) {
            self.more.push(block);
        }
    }

    fn pop(&self) -> Option<Block> {
        self.few.pop().or_else(|| self.more.pop())
    }
}

impl Pool {
    /// A pool of blocks of `len` bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { len, idle: Arc::new(Idle { few: ArrayQueue::new(Idle::FEW), more: SegQueue::new() }) }
    }

    /// A block whose [`Buffer::drop`] brings it back here. What it holds is unspecified.
    ///
    /// # Errors
    /// As [`Buffer::allocate`].
    pub fn take(&self) -> Result<Buffer, Fault> {
        if let Some((mapping, key)) = self.idle.pop() {
            return Ok(Buffer { mapping, key, len: self.len, home: Some(self.clone()) });
        }
        let mut buffer = Buffer::allocate(self.len)?;
        buffer.home = Some(self.clone());
        Ok(buffer)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(home) = &self.home {
            home.idle.push((Arc::clone(&self.mapping), self.key));
        }
    }
}

impl Buffer {
    /// A zeroed block of `len` bytes, its pages present.
    ///
    /// # Errors
    /// A [`Fault`] of kind `MemoryUnavailable` that says how much was asked for.
    pub fn allocate(len: usize) -> Result<Self, Fault> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if len >= CHECKED_BYTES
            && let Some(available) = available_memory()
            && len as u64 > available
        {
            return Err(Fault::new(
                FaultKind::MemoryUnavailable,
                format!(
                    "{len} bytes of shareable memory are more than the {available} bytes that are available: free memory, raise the container's memory limit, or use fewer ranks on this host"
                ),
            ));
        }
        let mapping = Mapping::allocate(len).map_err(|errno| {
            Fault::new(
                FaultKind::MemoryUnavailable,
                format!("{len} bytes of shareable memory could not be had ({errno}): free memory, raise the container's memory limit or the limit on open files (ulimit -n)"),
            )
        })?;
        let key = RegionKey(NEXT.fetch_add(1, Ordering::Relaxed));
        Ok(Self { mapping: Arc::new(mapping), key, len, home: None })
    }

    /// The name under which peers know this block once it is registered.
    #[must_use]
    pub const fn key(&self) -> RegionKey {
        self.key
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.mapping.bytes()[..self.len]
    }

    /// The bytes, to be written.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        &mut sys::bytes_mut(&mut self.mapping)[..len]
    }

    /// The bytes as elements of `T`. A tail shorter than one element is left out.
    #[must_use]
    pub fn as_slice<T: Element>(&self) -> &[T] {
        bytemuck::cast_slice(&self.bytes()[..self.len - self.len % size_of::<T>()])
    }

    /// The bytes as elements of `T`, to be written. A tail shorter than one element is left out.
    #[must_use]
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        let len = self.len - self.len % size_of::<T>();
        bytemuck::cast_slice_mut(&mut self.bytes_mut()[..len])
    }

    /// A part of the block as the source of a write. It keeps the memory alive, and cannot be read by safe code.
    ///
    /// # Panics
    /// When the range is not within the block.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Slice {
        assert!(range.start <= range.end && range.end <= self.len, "slice {range:?} of a buffer of {} bytes", self.len);
        Slice { mapping: Arc::clone(&self.mapping), key: self.key, range }
    }

    /// Whether this block came from `pool`.
    #[must_use]
    pub fn is_from(&self, pool: &Pool) -> bool {
        self.home.as_ref().is_some_and(|home| Arc::ptr_eq(&home.idle, &pool.idle))
    }

    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}

/// A part of a [`Buffer`]'s memory, as the source of a write.
#[derive(Clone, Debug)]
pub struct Slice {
    mapping: Arc<Mapping>,
    key: RegionKey,
    range: Range<usize>,
}

impl Slice {
    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.range.end - self.range.start
    }

    /// Whether the length is 0.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The key of the block this is a part of.
    #[must_use]
    pub const fn key(&self) -> RegionKey {
        self.key
    }

    /// Bytes from the start of the block.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.range.start
    }

    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_zeroed_typed_and_keeps_what_is_written() {
        let mut buffer = Buffer::allocate(4099).expect("allocate");
        assert!(buffer.bytes().iter().all(|byte| *byte == 0));
        buffer.as_mut_slice::<f32>()[1023] = 1.5;
        assert_eq!(buffer.as_slice::<f32>().len(), 1024);
        assert_eq!(buffer.as_slice::<f32>()[1023].to_bits(), 1.5f32.to_bits());
        assert_eq!(buffer.len(), 4099);
    }

    #[test]
    fn memory_that_is_to_be_written_to_keeps_what_it_has_wherever_it_begins_and_ends() {
        let mut memory: Vec<u8> = (0..3 << 20).map(|at| (at % 251) as u8).collect();
        let before = memory.clone();
        for (start, end) in [(0, 0), (1, 2), (1, 4097), (4095, 12_289), (77, 3 << 20)] {
            expect_writes(&mut memory[start..end]);
        }
        assert!(memory == before);
    }

    #[test]
    fn a_pool_gives_the_same_block_again() {
        let pool = Pool::new(100);
        let first = pool.take().expect("allocate");
        let key = first.key();
        let second = pool.take().expect("allocate");
        assert_ne!(second.key(), key);
        drop(first);
        assert_eq!(pool.take().expect("allocate").key(), key);
    }

    #[test]
    fn an_empty_buffer_works() {
        let mut buffer = Buffer::allocate(0).expect("allocate");
        assert!(buffer.is_empty() && buffer.bytes_mut().is_empty() && buffer.slice(0..0).is_empty());
    }

    #[test]
    fn impossible_sizes_are_a_fault() {
        let fault = Buffer::allocate(1 << 60).expect_err("must not be had");
        assert_eq!(fault.kind, FaultKind::MemoryUnavailable);
        assert!(fault.detail.contains("1152921504606846976 bytes"), "{fault}");
    }
}
