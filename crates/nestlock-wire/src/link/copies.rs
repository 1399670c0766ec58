//! Scripts whose writes must be copied to replicas.

use std::{
    future::{self, Future},
    pin::pin,
    task::Poll,
};

use futures_util::{FutureExt, poll};

use crate::{
    acks::{Acks, Copies, Receipt},
    clock::Instant,
    connection::Connection,
    epoch::Epoch,
    error::StoreError,
    failure::Failure,
    link::Link,
    request::Request,
    resp::Value,
    until::Until,
};

impl Link {
    /// Sends a script, and a WAIT right behind it unless one is in flight.
    pub(crate) async fn call_and_wait(
        &self,
        epoch: Epoch,
        connection: &Connection,
        request: Request<'_>,
        until: Until,
        copies: Copies,
    ) -> (Result<Value, Failure>, Option<Receipt>) {
        let mut asked = pin!(connection.call(request, until));
        let at_once = poll!(asked.as_mut());
        let (receipt, mut along) = self.wait_requests.behind(
            epoch,
            connection,
            at_once.is_pending(),
            copies,
            self.limit(),
        );
        if let Poll::Ready(answer) = at_once {
            return (answer, Some(receipt));
        }
        let answer = future::poll_fn(|cx| {
            // the WAIT is queued, and written only if it is polled
            if along
                .as_mut()
                .is_some_and(|along| along.poll_unpin(cx).is_ready())
            {
                along = None;
            }
            asked.as_mut().poll(cx)
        });
        (answer.await, Some(receipt))
    }

    /// Waits until enough replicas have what a script wrote, or the time for that is over. Returns
    /// how many have it.
    ///
    /// The script may have been executed, whatever this returns.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn acknowledged(&self, receipt: &Receipt, until: Until) -> Result<Acks, StoreError> {
        let rounds = async {
            loop {
                let (answer, is_for_it) = self.wait_requests.next_for(receipt, self.limit());
                let answer = answer.await;
                if is_for_it {
                    return answer;
                }
            }
        };
        let answer = self
            .in_time(until.remaining(Instant::now()), rounds)
            .await
            .unwrap_or(Err(Failure::TimedOut));
        let answer = if self.is_left() {
            Err(Failure::Ended)
        } else {
            answer
        };
        answer.map_err(|failure| self.failed(failure).that_may_have_executed())
    }
}
