//! From a checked request to jobs: finds the model, makes tokens of text, and holds the prompt
//! against what the model can take.

use std::ops::Range;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use kvasir_proto::v1;
use rand::Rng;
use serde_json::{Map, Value};

use super::answer::{Answer, Style};
use super::chat::ChatRequest;
use super::chunks::{self, NamedChunk};
use super::common::{Common, salted};
use super::completions::{CompletionRequest, Prompt};
use super::contexts::{ContextRequest, Source};
use super::error::ApiError;
use super::{Arrival, AskedContext};
use crate::cluster::ServedModel;
use crate::http::Front;
use crate::serve::{CacheClass, Failure, Job, Meter, Prompt as JobPrompt};
use crate::text::{ModelText, TextError};

/// What completions get that do not say how long they may be, as at OpenAI. Chats get all the
/// room there is.
const COMPLETION_TOKENS_DEFAULT: u32 = 16;
/// Hashing this many ids takes a fraction of a millisecond.
const IDS_INLINE_MAX: usize = 16 << 10;

/// Errors blame the `prompt`, which has another name in the request.
pub(super) async fn chat(
    front: &Front,
    arrival: &Arrival,
    request: ChatRequest,
) -> Result<(Answer, Vec<Job>), ApiError> {
    let ChatRequest { mut common, messages, add_generation_prompt, template_arguments } = request;
    permit_chunks(front, &common)?;
    let rendering = Rendering {
        messages,
        add_generation_prompt,
        template_arguments,
        add_special_tokens: common.add_special_tokens.unwrap_or(false),
        chunks: std::mem::take(&mut common.chunks),
    };
    let salt = salted(&arrival.tenant_salt, common.cache_salt.as_deref());
    let (prompt, served) = rendered(front, salt, &common.model, rendering).await?;
    let room = room_of(&prompt.tokens, "prompt", common.max_tokens, &served)?;
    let max_tokens = common.max_tokens.unwrap_or(room);
    assemble(front, arrival, common, Style::Chat, vec![(prompt, max_tokens)])
}

/// A chat, and how its template is to write it.
struct Rendering {
    messages: Vec<Value>,
    add_generation_prompt: bool,
    template_arguments: Map<String, Value>,
    add_special_tokens: bool,
    chunks: Vec<NamedChunk>,
}

/// Parts of a prompt are attended as if they stood alone only where that is let.
fn permit_chunks(front: &Front, common: &Common) -> Result<(), ApiError> {
    if common.chunks.is_empty() || front.chunk_reuse_enabled {
        return Ok(());
    }
    let member = chunks::MEMBER;
    let message = format!("`{member}` is not accepted: `chunk_reuse_enabled` is off.");
    Err(ApiError::invalid(member, message))
}

async fn rendered(
    front: &Front,
    salt: Arc<str>,
    name: &str,
    rendering: Rendering,
) -> Result<(JobPrompt, ServedModel), ApiError> {
    let (text, served) = model(front, name)?;
    let hashed = served.clone();
    let encode = move || {
        let Rendering {
            mut messages,
            add_generation_prompt,
            template_arguments,
            add_special_tokens,
            chunks,
        } = rendering;
        let template = text.template.as_ref().ok_or(TextError::NoTemplate)?;
        if !template.knows_developer() {
            for message in &mut messages {
                if message["role"] == "developer" {
                    message["role"] = "system".into();
                }
            }
        }
        let rendered = template.render(&messages, add_generation_prompt, &template_arguments)?;
        let room = hashed.context_tokens;
        let encode = |part: &str, special| text.encode(part, special, salt.as_bytes(), room);
        let (tokens, chunks) =
            chunks::encode(&rendered, &chunks, (add_special_tokens, room), text.frame(), encode)?;
        Ok::<_, TextError>(JobPrompt::new(tokens.into(), chunks.into(), &hashed, salt))
    };
    Ok((front.texts.run(encode).await??, served))
}

/// The prompt of a context: what a request of its kind begins with. There is room for an answer
/// after it, of one token at least.
pub(super) async fn context(
    front: &Front,
    arrival: &Arrival,
    request: ContextRequest,
) -> Result<JobPrompt, ApiError> {
    let ContextRequest { model: name, source, add_special_tokens, .. } = request;
    let (prompt, served) = match source {
        Source::Messages { messages, template_arguments } => {
            let rendering = Rendering {
                messages,
                add_generation_prompt: false,
                template_arguments,
                add_special_tokens: add_special_tokens.unwrap_or(false),
                chunks: Vec::new(),
            };
            rendered(front, Arc::clone(&arrival.tenant_salt), &name, rendering).await?
        }
        Source::Prompt(prompt) => {
            let (text, served) = model(front, &name)?;
            let (hashed, salt) = (served.clone(), Arc::clone(&arrival.tenant_salt));
            let add_special_tokens = add_special_tokens.unwrap_or(true);
            let encode = move || {
                let of = (&hashed, salt.as_bytes());
                let (tokens, chunks) = tokens_of(&text, prompt, &[], add_special_tokens, of)?;
                Ok::<_, TextError>(JobPrompt::new(tokens.into(), chunks.into(), &hashed, salt))
            };
            (front.texts.run(encode).await??, served)
        }
    };
    room_of(&prompt.tokens, "prompt", None, &served)?;
    Ok(prompt)
}

/// Serves a context's prompt: with one token of an answer, which is for nobody. Its blocks are there to be
/// kept, whatever its key says of others.
pub(crate) fn context_job(front: &Front, arrival: &Arrival, asked: &AskedContext) -> Job {
    let sampling = v1::SamplingParams {
        max_tokens: 1,
        top_p: 1.0,
        ignore_eos: true,
        ..v1::SamplingParams::default()
    };
    let (model, prompt) = (asked.model.as_str().into(), asked.prompt.clone());
    let cache = CacheClass::Normal;
    Job { lies_together: true, cache, ..job(front, arrival, model, prompt, sampling) }
}

/// A context's prompt with the keys of its model as it is now.
pub(crate) fn keyed_now(front: &Front, asked: &AskedContext) -> Result<JobPrompt, ApiError> {
    let (_, served) = model(front, &asked.model)?;
    Ok(asked.prompt.keyed(&served))
}

/// A prompt's tokens, out of the quota of its tenant.
pub(crate) fn take_prompt(
    front: &Front,
    arrival: &Arrival,
    prompt: &JobPrompt,
) -> Result<(), ApiError> {
    take_prompts(front, arrival, [prompt].into_iter())
}

pub(super) async fn completion(
    front: &Front,
    arrival: &Arrival,
    request: CompletionRequest,
) -> Result<(Answer, Vec<Job>), ApiError> {
    let CompletionRequest { mut common, prompts, echo } = request;
    permit_chunks(front, &common)?;
    let chunks = std::mem::take(&mut common.chunks);
    let (text, served) = model(front, &common.model)?;
    let add_special_tokens = common.add_special_tokens.unwrap_or(true);
    let quick = !echo && are_few_ids(&prompts);
    let salt = salted(&arrival.tenant_salt, common.cache_salt.as_deref());
    let hashed = served.clone();
    let encode = move || {
        let mut echoes = echo.then(Vec::new);
        let mut all = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            if let Some(echoes) = &mut echoes {
                echoes.push(match &prompt {
                    Prompt::Text(text) => text.clone(),
                    Prompt::Ids(ids) => text.tokenizer.decode(ids)?,
                });
            }
            let of = (&hashed, salt.as_bytes());
            let (tokens, chunks) = tokens_of(&text, prompt, &chunks, add_special_tokens, of)?;
            all.push(JobPrompt::new(tokens.into(), chunks.into(), &hashed, Arc::clone(&salt)));
        }
        Ok::<_, TextError>((all, echoes))
    };
    let (prompts, echo) = if quick { encode()? } else { front.texts.run(encode).await?? };
    let prompts = prompts
        .into_iter()
        .map(|prompt| {
            let room = room_of(&prompt.tokens, "prompt", common.max_tokens, &served)?;
            let max_tokens = common.max_tokens.unwrap_or(room.min(COMPLETION_TOKENS_DEFAULT));
            Ok((prompt, max_tokens))
        })
        .collect::<Result<Vec<_>, ApiError>>()?;
    assemble(front, arrival, common, Style::Completion { echo }, prompts)
}

fn tokens_of(
    text: &ModelText,
    prompt: Prompt,
    chunks: &[NamedChunk],
    add_special_tokens: bool,
    (served, salt): (&ServedModel, &[u8]),
) -> Result<(Vec<u32>, Vec<Range<u32>>), TextError> {
    match prompt {
        Prompt::Text(prompt) => {
            let room = served.context_tokens;
            let encode = |part: &str, special| text.encode(part, special, salt, room);
            chunks::encode(&prompt, chunks, (add_special_tokens, room), text.frame(), encode)
        }
        Prompt::Ids(ids) => {
            let ranges = chunks::ranges(chunks, ids.len())?;
            Ok((ids, ranges))
        }
    }
}

/// All prompts are ids, and so few that hashing them holds nobody up.
fn are_few_ids(prompts: &[Prompt]) -> bool {
    prompts.iter().map(Prompt::ids).fold(0, usize::saturating_add) <= IDS_INLINE_MAX
}

fn model(front: &Front, name: &str) -> Result<(Arc<ModelText>, ServedModel), ApiError> {
    let text = front.texts.model(name).ok_or_else(|| ApiError::model_not_found(name))?;
    let served = front.cluster.models().into_iter().find(|served| &*served.name == name);
    let Some(served) = served else {
        let reason = format!("no attached engine serves the model {name:?}");
        return Err(Failure::NoInstance { reason }.into());
    };
    Ok((text, served))
}

/// Tokens that the answer may have, at least one.
fn room_of(
    prompt: &[u32],
    param: &str,
    max_tokens: Option<u32>,
    served: &ServedModel,
) -> Result<u32, ApiError> {
    if prompt.is_empty() {
        return Err(ApiError::invalid(param, "The prompt must have at least one token."));
    }
    if let Some(id) = prompt.iter().find(|id| **id >= served.vocab_size) {
        let message = format!(
            "Token id {id} is not in the model's vocabulary of {} tokens.",
            served.vocab_size
        );
        return Err(ApiError::invalid(param, message));
    }
    let context = served.context_tokens;
    let length = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let room = context.saturating_sub(length);
    if room < max_tokens.unwrap_or(1) {
        let answer = match max_tokens {
            Some(tokens) => format!("and up to {tokens} for the answer"),
            None => "and at least 1 for the answer".to_owned(),
        };
        let message = format!(
            "This model's context has {context} tokens. The request needs {length} for the prompt {answer}."
        );
        let error = ApiError::invalid(param, message);
        return Err(ApiError { code: "context_length_exceeded", ..error });
    }
    Ok(room)
}

fn assemble(
    front: &Front,
    arrival: &Arrival,
    common: Common,
    style: Style,
    prompts: Vec<(JobPrompt, u32)>,
) -> Result<(Answer, Vec<Job>), ApiError> {
    take_prompts(front, arrival, prompts.iter().map(|(prompt, _)| prompt))?;
    let seed = common.seed.unwrap_or_else(|| rand::rng().random());
    let model: Arc<str> = common.model.as_str().into();
    let mut jobs = Vec::with_capacity(prompts.len() * common.n as usize);
    for (prompt, max_tokens) in &prompts {
        for choice in 0..u64::from(common.n) {
            let sampling = v1::SamplingParams {
                max_tokens: *max_tokens,
                // Each choice draws for itself; the first as if it were alone.
                seed: seed.wrapping_add(choice),
                ..common.sampling.clone()
            };
            let one = job(front, arrival, Arc::clone(&model), prompt.clone(), sampling);
            jobs.push(Job { streamed: common.stream, ..one });
        }
    }
    let prefix = match style {
        Style::Chat => "chatcmpl",
        Style::Completion { .. } => "cmpl",
    };
    let answer = Answer {
        id: format!("{prefix}-{:032x}", rand::rng().random::<u128>()),
        created_unix_s: unix_seconds(),
        model: common.model,
        style,
        n: common.n,
        prompts: prompts.into_iter().map(|(prompt, _)| prompt.tokens).collect(),
        logprobs: common.sampling.logprobs,
        return_token_ids: common.return_token_ids,
        include_usage: common.include_usage,
    };
    Ok((answer, jobs))
}

/// The prompts' tokens, out of the quota of their tenant.
fn take_prompts<'a>(
    front: &Front,
    arrival: &Arrival,
    prompts: impl Iterator<Item = &'a JobPrompt>,
) -> Result<(), ApiError> {
    let Some(admission) = &arrival.admission else { return Ok(()) };
    let tokens = prompts.map(|prompt| u64::from(prompt.length())).sum();
    admission.take_prompt(tokens).map_err(|over| front.over_quota(&over))
}

/// An answer that is not streamed.
fn job(
    front: &Front,
    arrival: &Arrival,
    model: Arc<str>,
    prompt: JobPrompt,
    sampling: v1::SamplingParams,
) -> Job {
    Job {
        model,
        prompt,
        sampling,
        request_id: Arc::clone(&arrival.request_id),
        streamed: false,
        explain: arrival.explain,
        objectives: arrival.objectives,
        steering: arrival.steering.clone(),
        cache: arrival.cache,
        lies_together: false,
        trace: arrival.trace.clone(),
        meter: Meter::new(arrival.admission.clone()),
        claim: arrival.claim.clone(),
        arrived: arrival.at,
        deadline: arrival.at + front.request_deadline,
    }
}

pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_of_text_are_never_few_ids_however_many_there_are() {
        let text = || Prompt::Text("hi".to_owned());
        let ids = |count: usize| Prompt::Ids(vec![1; count]);
        for (prompts, want) in [
            (vec![text()], false),
            (vec![text(), text(), text()], false),
            // The sum of these goes round to one.
            (vec![text(), text(), ids(3)], false),
            (vec![ids(IDS_INLINE_MAX)], true),
            (vec![ids(IDS_INLINE_MAX), ids(1)], false),
            (vec![ids(1), ids(2), ids(3)], true),
        ] {
            assert_eq!(are_few_ids(&prompts), want, "{} prompts", prompts.len());
        }
    }
}
