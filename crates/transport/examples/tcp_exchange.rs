//! How close TCP links come to the kernel's own speed: two threads exchange the same bytes both ways at once, first
//! with plain blocking sockets, then through `TcpTransport`, and send small messages back and forth.
//!
//! `cargo run --release -p gradwire-transport --example tcp_exchange [MEBIBYTES [WRITE_KIBIBYTES [ROUNDS]]]`

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use gradwire_proto::{Fault, Rank};
use gradwire_transport::tcp::TcpTransport;
use gradwire_transport::{Buffer, Remote, Sink, Transport};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What one side does, told how to reach the other.
type Side = fn(TcpStream, Rank, Size) -> Result<Vec<f64>, Failure>;

#[derive(Clone, Copy)]
struct Size {
    bytes: usize,
    write_bytes: usize,
    rounds: usize,
}

fn main() -> Result<(), Failure> {
    let argument = |index, default: usize| std::env::args().nth(index).map_or(Ok(default), |text| text.parse());
    let size = Size { bytes: argument(1, 64)? << 20, write_bytes: argument(2, 256)? << 10, rounds: argument(3, 20)? };
    let names: [(&str, Side); 2] = [("plain blocking sockets", plain), ("TcpTransport", transport)];
    for (name, side) in names {
        let best = run(side, size)?;
        let gigabytes = size.bytes as f64 / 1e9;
        println!(
            "{name}: best {:.2} ms, median {:.2} ms, {:.2} GB/s each way",
            best[0],
            best[best.len() / 2],
            gigabytes / best[0] * 1e3
        );
    }
    let times = run(ping_pong, size)?;
    println!("message there and back: best {:.2} us, median {:.2} us", times[0], times[times.len() / 2]);
    Ok(())
}

fn run(side: Side, size: Size) -> Result<Vec<f64>, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let dialed = TcpStream::connect(listener.local_addr()?)?;
    let accepted = listener.accept()?.0;
    let other = std::thread::spawn(move || side(dialed, Rank(0), size));
    let mut times = side(accepted, Rank(1), size)?;
    other.join().map_err(|_| "the other side panicked")??;
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// Blocking writes and reads by turns, of a size that never blocks for long: one thread, as `TcpTransport`.
fn plain(mut stream: TcpStream, _: Rank, size: Size) -> Result<Vec<f64>, Failure> {
    stream.set_nodelay(true)?;
    let (source, mut target) = (vec![1u8; size.bytes], vec![0u8; size.bytes]);
    let mut times = Vec::new();
    for _ in 0..size.rounds {
        let start = Instant::now();
        for at in (0..size.bytes).step_by(size.write_bytes) {
            let end = (at + size.write_bytes).min(size.bytes);
            stream.write_all(&source[at..end])?;
            stream.read_exact(&mut target[at..end])?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(times)
}

#[derive(Default)]
struct Counts {
    written: usize,
    sent: usize,
    messages: Vec<Vec<u8>>,
    received: usize,
    down: Option<Fault>,
}

impl Sink for Counts {
    fn admit(&mut self, _: Rank, _: &[u8], _: Remote, _: usize) -> bool {
        true
    }
    fn message(&mut self, _: Rank, message: &[u8]) {
        self.received += 1;
        if message.len() == 8 {
            self.messages.push(message.to_vec());
        }
    }
    fn written(&mut self, _: Rank, _: &[u8], _: Remote, bytes: usize) {
        self.written += bytes;
    }
    fn sent(&mut self, _: Rank, _: u64) {
        self.sent += 1;
    }
    fn peer_down(&mut self, _: Rank, fault: Fault) {
        self.down = Some(fault);
    }
}

fn transport(stream: TcpStream, peer: Rank, size: Size) -> Result<Vec<f64>, Failure> {
    let mut transport = TcpTransport::new()?;
    transport.attach(peer, stream)?;
    let (source, target) = (Buffer::allocate(size.bytes)?, Buffer::allocate(size.bytes)?);
    transport.register(&source)?;
    transport.register(&target)?;
    let mut counts = Counts::default();
    transport.send(peer, &target.key().0.to_le_bytes())?;
    while counts.messages.is_empty() {
        transport.poll(&mut counts);
    }
    let region = gradwire_proto::RegionKey(u64::from_le_bytes(counts.messages[0].as_slice().try_into()?));
    let mut times = Vec::new();
    for round in 0..size.rounds {
        let start = Instant::now();
        let mut at = 0;
        while counts.written < size.bytes * (round + 1) || at < size.bytes || !transport.is_flushed(peer) {
            while at < size.bytes {
                let end = (at + size.write_bytes).min(size.bytes);
                let target = Remote { region, offset: at as u64 };
                if transport.write(peer, &[0; 64], source.slice(at..end), target, 0).is_err() {
                    break;
                }
                at = end;
            }
            transport.poll(&mut counts);
            if let Some(fault) = counts.down.take() {
                return Err(fault.into());
            }
        }
        times.push(start.elapsed().as_secs_f64() * 1e3);
        transport.send(peer, b"next")?;
        while counts.received < round + 2 || !transport.is_flushed(peer) {
            transport.poll(&mut counts);
        }
    }
    finish(transport, peer, &mut counts)?;
    Ok(times)
}

fn ping_pong(stream: TcpStream, peer: Rank, size: Size) -> Result<Vec<f64>, Failure> {
    let mut transport = TcpTransport::new()?;
    transport.attach(peer, stream)?;
    let mut counts = Counts::default();
    let mut times = Vec::new();
    for round in 0..size.rounds * 500 {
        let start = Instant::now();
        if peer == Rank(1) {
            transport.send(peer, &[0; 64])?;
        }
        while counts.received <= round {
            transport.poll(&mut counts);
        }
        if peer == Rank(0) {
            transport.send(peer, &[0; 64])?;
        }
        transport.poll(&mut counts);
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    finish(transport, peer, &mut counts)?;
    Ok(times)
}

/// Neither side closes while the other still reads: rank 0's side waits for the other to go first.
fn finish(mut transport: TcpTransport, peer: Rank, counts: &mut Counts) -> Result<(), Failure> {
    while !transport.is_flushed(peer) {
        transport.poll(counts);
    }
    while peer == Rank(1) && counts.down.is_none() {
        transport.poll(counts);
    }
    Ok(())
}
