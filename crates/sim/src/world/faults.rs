//! What goes wrong, when its time has come.

use super::{BrokerEvent, Event, World};
use crate::event::US;
use crate::network::Item;
use crate::plan::Fault;
use crate::process::Incoming;
use crate::report::{ProcessId, Report};

impl World<'_> {
    pub(super) fn begin_fault(&mut self, index: usize) {
        let fault = self.plan.faults[index].fault;
        self.trace.note(self.now, (7u8, index), format_args!("fault {index}: {fault:?}"));
        match fault {
            Fault::Link(link) => self.network.begin_link_fault(link, self.now),
            Fault::Cut { for_us, side, one_way } => {
                self.network.begin_cut(side, one_way, self.now + for_us * US);
            }
            Fault::Break { a, b } => {
                if let (Some(a), Some(b)) = (self.at(a), self.at(b)) {
                    self.send(a, b, Item::Down);
                    self.send(b, a, Item::Down);
                }
            }
            Fault::Slow { rank, for_us, by_us } => {
                if let Some(process) = self.at(rank) {
                    self.processes[process.index()].slow += by_us * US;
                    let by = by_us * US;
                    self.queue.plan(self.now + for_us * US, Event::Quicker { process, by });
                }
            }
            Fault::Stop { rank, for_us } => {
                if let Some(process) = self.at(rank).filter(|process| !self.processes[process.index()].stopped) {
                    self.processes[process.index()].stopped = true;
                    self.processes[process.index()].turn_at = None;
                    self.report(process, &Report::Stopped);
                    self.queue.plan(self.now + for_us * US, Event::Resume(process));
                }
            }
            Fault::Hang { rank, for_us } => {
                if let Some(process) = self.at(rank) {
                    self.hand(process, Incoming::Hang { until: self.now + for_us * US });
                }
            }
            Fault::Crash { rank, back_us, disk, silent } => self.crash(rank, back_us, disk, silent),
            Fault::Leave { rank } => {
                if let Some(process) = self.at(rank) {
                    self.hand(process, Incoming::Leave);
                }
            }
            Fault::Join { rank } => {
                if (rank as usize) < self.places.len() && self.at(rank).is_none() {
                    self.start_at(self.now, rank);
                }
            }
            Fault::Replace { rank } => {
                if self.at(rank).is_some() {
                    self.start_at(self.now, rank);
                }
            }
            Fault::BrokerDown { for_us, restart } => self.broker_down(self.now + for_us * US, restart),
            Fault::BrokerLink { rank } => {
                if let Some(process) = self.at(rank) {
                    self.lose_broker_link(process);
                }
            }
            Fault::BrokerSlow { for_us, by_us } => {
                self.brokerage.slow += by_us * US;
                self.queue.plan(self.now + for_us * US, BrokerEvent::Quicker { by: by_us * US }.into());
            }
            Fault::BrokerTwice { for_us, odds } => {
                self.brokerage.twice += odds;
                self.queue.plan(self.now + for_us * US, BrokerEvent::Once { odds }.into());
            }
        }
    }

    /// The process of that place, if it runs.
    fn at(&self, place: u32) -> Option<ProcessId> {
        let process = self.places.get(place as usize).copied().flatten()?;
        self.is_running(process).then_some(process)
    }

    fn crash(&mut self, place: u32, back_us: Option<u64>, disk: bool, silent: bool) {
        let Some(process) = self.at(place) else { return };
        self.report(process, &Report::Died);
        self.over(process, silent);
        if !disk {
            self.disks[place as usize] = None;
        }
        if let Some(back_us) = back_us {
            self.start_at(self.now + back_us * US, place);
        }
    }

    pub(super) fn resume(&mut self, process: ProcessId) {
        if !self.is_running(process) {
            return;
        }
        self.processes[process.index()].stopped = false;
        self.report(process, &Report::Resumed);
        self.turn_by(process, self.now);
    }
}
