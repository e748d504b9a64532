//! The system calls that need raw memory: gathering sends, and receives straight into registered memory.
#![allow(unsafe_code)]

use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::time::Duration;

use crate::Slice;
use crate::region::Mapping;

/// Most parts that one send gathers.
pub(super) const PARTS_MAX: usize = 64;

/// One part of a gathering send.
pub(super) enum Part<'a> {
    /// Bytes of ours.
    Bytes(&'a [u8]),
    /// Registered memory from this many bytes after the slice's start, at most so many bytes.
    Memory(&'a Slice, usize, usize),
}

/// Sends `parts` (at most [`PARTS_MAX`] of them are used) without waiting. Returns how many bytes were offered, and
/// how many the kernel took.
pub(super) fn send<'a>(
    socket: BorrowedFd<'_>,
    parts: impl Iterator<Item = Part<'a>>,
) -> Result<(usize, usize), io::Error> {
    const EMPTY: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
    let mut vectors = [EMPTY; PARTS_MAX];
    let (mut count, mut offered) = (0, 0);
    for (vector, part) in vectors.iter_mut().zip(parts) {
        *vector = match part {
            Part::Bytes(bytes) => libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() },
            Part::Memory(slice, skip, most) => {
                let skip = skip.min(slice.len());
                let start = slice.mapping().as_ptr().wrapping_add(slice.offset() + skip);
                libc::iovec { iov_base: start.cast(), iov_len: (slice.len() - skip).min(most) }
            }
        };
        count += 1;
        offered += vector.iov_len;
    }
    let message = message_header(&mut vectors[..count]);
    // SAFETY: `message` points to `count` initialised vectors on this stack frame. Each covers bytes that live and
    // are readable during the call: borrowed slices for 'a, or a part of a mapping, which a `Slice` holds within
    // the mapping's bounds and keeps alive. The kernel only reads them, and no Rust reference to the mapping is made.
    let sent = retry(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, FLAGS | libc::MSG_NOSIGNAL) })?;
    Ok((offered, sent))
}

/// Registered memory that a receive may fill.
pub(super) struct Landing<'a> {
    /// The memory.
    pub(super) mapping: &'a Mapping,
    /// Bytes from its start.
    pub(super) offset: usize,
    /// How many bytes.
    pub(super) len: usize,
}

impl Landing<'_> {
    fn start(&self) -> *mut u8 {
        assert!(
            self.offset.checked_add(self.len).is_some_and(|end| end <= self.mapping.len()),
            "a landing outside of its mapping"
        );
        self.mapping.as_ptr().wrapping_add(self.offset)
    }

    /// Copies `bytes`, which must not be more than the landing holds, to its start. Called inside `Transport::poll`.
    pub(super) fn fill(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "more bytes than the landing holds");
        // SAFETY: `start` checked that the landing is within the mapping, and `bytes` is no longer than it. The
        // target is memory of a `Buffer` whose owner holds no borrow of it during `Transport::poll` (see
        // `Mapping::as_ptr`), and `bytes`, which is the transport's own memory, cannot overlap it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.start(), bytes.len()) };
    }
}

/// Receives without waiting: first into `landing`, what is left into `spill`. Called inside `Transport::poll`.
/// Returns the number of bytes; 0 at the end of the stream.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    landing: Option<&Landing<'_>>,
    spill: &mut [u8],
) -> Result<usize, io::Error> {
    let mut vectors = [
        libc::iovec { iov_base: spill.as_mut_ptr().cast(), iov_len: spill.len() },
        libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 },
    ];
    let mut count = 1;
    if let Some(landing) = landing {
        vectors[1] = vectors[0];
        vectors[0] = libc::iovec { iov_base: landing.start().cast(), iov_len: landing.len };
        count = 2;
    }
    let mut message = message_header(&mut vectors[..count]);
    // SAFETY: `message` points to `count` initialised vectors on this stack frame: the spill, borrowed mutably for
    // the call, and the landing, which `start` found to be within its mapping and whose owner holds no borrow of it
    // during `Transport::poll` (see `Mapping::as_ptr`). The kernel writes within their lengths only.
    retry(|| unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, FLAGS) })
}

/// How the kernel sees a link that has not answered.
pub(super) struct Silence {
    /// Retransmissions and window probes in a row that nothing answered.
    pub(super) unanswered: u32,
    /// Since the host last acknowledged something.
    pub(super) since: Duration,
}

/// Asks the kernel how long the host at the other end has been silent while we wanted something from it.
pub(super) fn silence(socket: BorrowedFd<'_>) -> Result<Silence, io::Error> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = mem::size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, the size of `info`, to it.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut len)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `tcp_info` is integers only: zeroed above, and then in part overwritten, all of it is valid.
    let info = unsafe { info.assume_init() };
    Ok(Silence {
        unanswered: u32::from(info.tcpi_retransmits) + u32::from(info.tcpi_probes),
        since: Duration::from_millis(u64::from(info.tcpi_last_ack_recv)),
    })
}

const FLAGS: libc::c_int = libc::MSG_DONTWAIT;

fn message_header(vectors: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: `msghdr` is integers and pointers, for all of which zero is a valid value: no name, no control data.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len() as _;
    message
}

fn retry(mut call: impl FnMut() -> isize) -> Result<usize, io::Error> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
