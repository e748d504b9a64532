//! The streams over which state is given away.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::fs::sendfile;
use rustix::io::Errno;
use socket2::Socket;

use super::sys;

/// Bytes that may wait in a Unix socket; what the system gives by default lets both sides sleep again and again. TCP finds
/// its own measure.
const UNIX_BUFFER_BYTES: usize = 2 << 20;

/// A stream over which state is given away: blocks, with time-outs.
#[derive(Debug)]
pub struct StateStream(Socket);

impl StateStream {
    pub(super) fn over(socket: Socket) -> io::Result<Self> {
        socket.set_nonblocking(false)?;
        if socket.local_addr()?.is_unix() {
            // As much of it as the system allows.
            let _ = socket.set_send_buffer_size(UNIX_BUFFER_BYTES);
        } else {
            let _ = socket.set_tcp_nodelay(true);
        }
        Ok(Self(socket))
    }

    /// How long reading and writing may wait for the other side.
    ///
    /// # Errors
    /// What the system says.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.0.set_read_timeout(Some(timeout))?;
        self.0.set_write_timeout(Some(timeout))
    }

    /// Sends `head`, and after it `bytes` bytes of a file from `offset`, which the kernel takes from where they are: they
    /// must stay as they are until the other side has them.
    ///
    /// For threads that do nothing else: the calling thread hears of no SIGPIPE from then on.
    ///
    /// # Errors
    /// What the system says, as of [`Write::write_all`].
    pub fn write_file(&mut self, head: &[u8], file: &File, mut offset: u64, bytes: usize) -> io::Result<()> {
        let mut left = head;
        while !left.is_empty() {
            match self.0.send_with_flags(left, libc::MSG_NOSIGNAL | libc::MSG_MORE) {
                Ok(sent) => left = &left[sent..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        sys::block_sigpipe();
        let mut left = bytes;
        while left > 0 {
            match sendfile(self.0.as_fd(), file.as_fd(), Some(&mut offset), left) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends before")),
                Ok(sent) => left -= sent,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Another handle on the same stream: e.g. to end it from another thread.
    ///
    /// # Errors
    /// What the system says.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Ends the stream in both directions: whoever waits on it wakes up.
    pub fn end(&self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Read for StateStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for StateStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Whoever writes to a peer that is gone gets an error, not a signal.
        self.0.send_with_flags(bytes, libc::MSG_NOSIGNAL)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pairs() -> [(Socket, Socket); 2] {
        let (a, b) = UnixStream::pair().expect("a pair");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let dialled = TcpStream::connect(listener.local_addr().expect("its address")).expect("it listens");
        let (accepted, _) = listener.accept().expect("somebody is there");
        [(a.into(), b.into()), (dialled.into(), accepted.into())]
    }

    fn memory(bytes: &[u8]) -> File {
        let mut file = File::from(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).expect("memory"));
        file.write_all(bytes).expect("room");
        file
    }

    #[test]
    fn a_part_of_a_file_follows_its_head() {
        let bytes: Vec<u8> = (0..1_500_000_u32).map(|at| (at / 7) as u8).collect();
        let file = memory(&bytes);
        for (here, there) in pairs() {
            let (mut here, mut there) =
                (StateStream::over(here).expect("it is"), StateStream::over(there).expect("it is"));
            let got = std::thread::scope(|scope| {
                scope.spawn(|| here.write_file(b"head", &file, 5, 1_000_003).expect("it is read"));
                let mut got = vec![0; 4 + 1_000_003];
                there.read_exact(&mut got).expect("all is sent");
                got
            });
            assert!(got.starts_with(b"head") && got[4..] == bytes[5..1_000_008]);
        }
    }

    #[test]
    fn a_peer_that_is_gone_or_reads_nothing_is_an_error_and_no_signal() {
        let file = memory(&[7; 4 << 20]);
        for (here, there) in pairs() {
            let mut stream = StateStream::over(here).expect("it is");
            stream.set_timeout(Duration::from_millis(50)).expect("a time-out");
            // More than fits anywhere on the way.
            let stuck = (0..16).find_map(|_| stream.write_file(&[], &file, 0, 4 << 20).err()).expect("nobody reads");
            assert_eq!(stuck.kind(), io::ErrorKind::WouldBlock);
            drop(there);
            (0..16).find_map(|_| stream.write_file(&[], &file, 0, 4 << 20).err()).expect("nobody is there");
            assert!(stream.write_file(&[], &memory(&[]), 0, 1).is_err());
        }
    }
}
