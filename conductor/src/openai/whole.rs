//! An answer in one piece: collects the pieces of all choices.

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};

use super::answer::Collected;
use super::error::ApiError;
use super::writer::Writer;
use crate::serve::{Failure, Output, Outputs, Progress};

pub(super) async fn respond(
    writer: Writer,
    first: Output,
    mut outputs: Outputs,
) -> Result<Response, ApiError> {
    let choices = outputs.choices();
    let mut collected: Vec<Collected> = (0..choices).map(|_| Collected::default()).collect();
    let keep_tokens = writer.keeps_tokens();
    let mut running = choices;
    let mut next = Some(first);
    while running > 0 {
        let output = match next.take() {
            Some(output) => output,
            None => outputs.next().await.ok_or_else(Failure::vanished)?,
        };
        let one = &mut collected[output.choice as usize];
        match output.progress {
            Progress::Placed(_) => {}
            Progress::Anew => *one = Collected::default(),
            Progress::Tokens(piece) => {
                one.text.push_str(&piece.text);
                if keep_tokens {
                    one.tokens.extend(piece.tokens);
                }
            }
            Progress::Ended { text: rest, ended } => {
                one.text.push_str(&rest);
                one.state.ended = Some(ended);
                running -= 1;
            }
            Progress::Failed(failure) => return Err(failure.into()),
        }
    }
    let json = HeaderValue::from_static("application/json");
    Ok(([(header::CONTENT_TYPE, json)], writer.whole(&collected)).into_response())
}
