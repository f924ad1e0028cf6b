//! How a path's sending end comes up: the greeting, the way to the peer's card, the pipe, and a trial of each of
//! its lanes.

use std::num::NonZeroU32;

use kvasir_transfer_core::signal::Ordering;
use prost::Message;

use super::{RdmaOut, SHAKE_AGAIN_US, State};
use crate::hello::{Admission, HelloReply};
use crate::rdma::CardError;
use crate::rdma::nic::{From, Post, To};
use crate::rdma::seek::Sought;
use crate::worker::hub::Hub;
use crate::worker::link::{LinkEnd, Turn, path_limits};

impl RdmaOut {
    pub(super) fn greet(&mut self) -> Result<bool, LinkEnd> {
        if !self.control.is_connected()? {
            return Ok(false);
        }
        let State::Connecting { hello } = &self.state else { return Ok(false) };
        self.control.greet(hello);
        self.state = State::AwaitingReply;
        Ok(true)
    }

    pub(super) fn read_reply(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        let busy = self.control.read()?;
        let Some(body) = self.control.greeting()? else { return Ok(busy) };
        let reply = HelloReply::decode(body.as_slice()).map_err(|_| LinkEnd::Malformed)?;
        match reply.admission() {
            Admission::Admitted => {}
            Admission::CutOff => return Err(LinkEnd::Declined { cut_offs: Some(reply.cut_offs) }),
            // Another domain may do.
            Admission::NoCard => return Err(LinkEnd::Refused),
            Admission::OtherIncarnation => return Err(LinkEnd::Replaced),
            _ => return Err(LinkEnd::Declined { cut_offs: None }),
        }
        self.is_relaxed = reply.is_relaxed;
        match hub.cards.seek(self.card, &reply.card) {
            Ok(Some(sought)) => self.state = State::Seeking { target: reply.card, sought },
            Ok(None) => self.tell_card(&reply.card, hub)?,
            Err(error) => return Err(no_pipe(&error, hub)),
        }
        Ok(true)
    }

    /// Goes on as soon as the way to the peer's card is known.
    pub(super) fn seek(&mut self, hub: &mut Hub, turn: &mut Turn) -> Result<bool, LinkEnd> {
        let State::Seeking { target, sought } = &mut self.state else { return Ok(false) };
        match sought.found() {
            None => {
                turn.wait_until_us = turn.wait_until_us.min(hub.now_us + Sought::LOOK_AGAIN_US);
                // The end of the connection is the end of the pipe, also now.
                self.control.read()
            }
            Some(Ok(())) => {
                let target = std::mem::take(target);
                self.tell_card(&target, hub)?;
                Ok(true)
            }
            Some(Err(error)) => Err(no_pipe(error, hub)),
        }
    }

    fn tell_card(&mut self, target: &[u8], hub: &mut Hub) -> Result<(), LinkEnd> {
        let Some(rdma) = hub.cards.get_mut(self.card) else { return Err(LinkEnd::Lost) };
        rdma.card.connect(self.pipe, target).map_err(|error| no_pipe(&error, hub))?;
        self.state = State::Shaking { again_us: hub.now_us + SHAKE_AGAIN_US };
        Ok(())
    }

    /// Tries the pipe, as soon as both cards know of it.
    pub(super) fn shake(&mut self, hub: &mut Hub, turn: &mut Turn) -> Result<bool, LinkEnd> {
        let State::Shaking { again_us } = &mut self.state else { return Ok(false) };
        let Some(rdma) = hub.cards.get_mut(self.card) else { return Err(LinkEnd::Lost) };
        if !rdma.card.is_connected(self.pipe) {
            if hub.now_us >= *again_us {
                rdma.card.ask_again(self.pipe);
                *again_us = hub.now_us + SHAKE_AGAIN_US;
            }
            turn.wait_until_us = turn.wait_until_us.min(*again_us);
            // The end of the connection is the end of the pipe, also now.
            return self.control.read();
        }
        for lane in 0..self.bounds.lanes {
            let (from, to, imm, is_fenced) = (From::Nothing, To::Nowhere, None, false);
            let trial = Post { from, to, imm, tag: 0, is_fenced, is_told: true };
            rdma.post(self.pipe, lane, &[trial]).map_err(|_| LinkEnd::Lost)?;
        }
        self.state = State::Trying { lanes: self.bounds.lanes };
        Ok(true)
    }

    pub(super) fn lane_reached(&mut self, hub: &mut Hub) {
        let State::Trying { lanes } = &mut self.state else { return };
        *lanes -= 1;
        if *lanes == 0 {
            self.state = State::Up;
            let way = (self.domain, self.rail);
            let mut limits = path_limits(way, self.write_lanes(), hub);
            if self.is_relaxed {
                // Whoever polls memory there may see a word before what was placed before it.
                limits.ordering = Ordering::None;
            }
            hub.sender.path_up(self.lane.session, self.lane.path, limits, hub.now_us);
        }
    }

    pub(super) fn write_lanes(&self) -> NonZeroU32 {
        let lanes = u32::try_from(self.bounds.lanes.saturating_sub(1)).ok();
        lanes.and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN)
    }
}

fn no_pipe(error: &CardError, hub: &Hub) -> LinkEnd {
    let error = error.sentence();
    tracing::warn!(engine = %hub.shared.config.name, error, "the transfer engine cannot create an RDMA connection to a peer");
    // Such as a route that is gone for a while.
    LinkEnd::Lost
}
