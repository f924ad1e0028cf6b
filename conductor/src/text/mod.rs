//! From text to tokens: tokenizer and chat template of each configured model.
//!
//! Runs on blocking threads, at most `concurrent_tokenizations_max` at once, so that a long prompt never
//! holds up the reactor. Who waits for a thread is bounded by the requests that are let in. Text
//! that comes back is made by the engines, not here.

mod memo;
mod pieces;
mod template;
mod tokenizer;

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::config::ModelConfig;
use crate::error::Error;

pub(crate) use memo::Memo;
pub(crate) use pieces::Frame;
pub(crate) use template::ChatTemplate;
use tokenizer::Remembered;
pub(crate) use tokenizer::{PromptTokenizer, SpecialTokens};

/// One model's way from text to tokens.
#[derive(Debug)]
pub(crate) struct ModelText {
    name: String,
    memo: Arc<Memo>,
    pub tokenizer: PromptTokenizer,
    /// Absent when the model has none: it then answers completions only.
    pub template: Option<ChatTemplate>,
}

/// What a client's text did not survive.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TextError {
    #[error("The model has no chat template; use /v1/completions.")]
    NoTemplate,
    /// The template refused the messages (`raise_exception`) or failed on them.
    #[error("The chat template of the model rejects these messages: {0}.")]
    Template(String),
    #[error("Cannot tokenize the prompt: {0}.")]
    Tokenize(String),
    /// A part of the prompt that was named is not one.
    #[error("{why}")]
    Chunk { why: String },
    /// So many tokens at the very least, which is more than there is room for.
    #[error("The prompt is too long: it has at least {at_least} tokens; shorten it.")]
    TooLong { at_least: usize },
    /// A thread panicked or the runtime is shutting down.
    #[error("The conductor failed to tokenize the prompt; send the request again.")]
    Interrupted,
}

impl ModelText {
    /// What the tokenizer puts around every text; absent when that is not always the same.
    pub(crate) fn frame(&self) -> Option<&Frame> {
        self.tokenizer.frame()
    }

    /// The tokens of a tenant's prompt; see [`PromptTokenizer::encode`].
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        salt: &[u8],
        tokens_max: u32,
    ) -> Result<Vec<u32>, TextError> {
        let remembered = Remembered { memo: &self.memo, model: &self.name, salt };
        self.tokenizer.encode(text, add_special_tokens, tokens_max, remembered)
    }
}

/// All configured models, and the bound on work for them.
#[derive(Debug)]
pub(crate) struct Texts {
    models: BTreeMap<String, Arc<ModelText>>,
    permits: Arc<Semaphore>,
}

impl Texts {
    /// Reads the files of every model; blocks while it does.
    pub(crate) fn load(
        models: &[ModelConfig],
        parallel: usize,
        memo: Memo,
    ) -> Result<Texts, Error> {
        let memo = Arc::new(memo);
        let load = |config: &ModelConfig| {
            let (tokenizer, special) = PromptTokenizer::load(&config.tokenizer_dir)?;
            let template = ChatTemplate::load(&config.tokenizer_dir, &special)?;
            let (name, memo) = (config.name.clone(), Arc::clone(&memo));
            Ok(Arc::new(ModelText { name, memo, tokenizer, template }))
        };
        let models = models
            .iter()
            .map(|config| match load(config) {
                Ok(text) => Ok((config.name.clone(), text)),
                Err(reason) => Err(Error::Model { model: config.name.clone(), reason }),
            })
            .collect::<Result<_, _>>()?;
        Ok(Texts { models, permits: Arc::new(Semaphore::new(parallel)) })
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.models.keys().map(String::as_str)
    }

    pub(crate) fn model(&self, name: &str) -> Option<Arc<ModelText>> {
        self.models.get(name).cloned()
    }

    /// Runs `work` on a blocking thread when one of the permits is free.
    pub(crate) async fn run<T, F>(&self, work: F) -> Result<T, TextError>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit = permit.map_err(|_| TextError::Interrupted)?;
        // The permit goes with the work: a request that is cancelled does not stop its thread.
        let work = move || {
            let result = work();
            drop(permit);
            result
        };
        tokio::task::spawn_blocking(work).await.map_err(|_| TextError::Interrupted)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_more_prompts_are_tokenized_at_once_than_allowed() {
        let texts = Arc::new(Texts::load(&[], 2, Memo::none()).expect("no models"));
        let running = Arc::new(AtomicUsize::new(0));
        let tasks = (0..16).map(|_| {
            let (texts, running) = (Arc::clone(&texts), Arc::clone(&running));
            tokio::spawn(async move {
                let work = move || {
                    let at_once = running.fetch_add(1, Ordering::SeqCst) + 1;
                    std::thread::sleep(std::time::Duration::from_millis(2));
                    running.fetch_sub(1, Ordering::SeqCst);
                    at_once
                };
                texts.run(work).await.expect("runs")
            })
        });
        for at_once in futures::future::join_all(tasks).await {
            assert!(at_once.expect("no panic") <= 2);
        }
    }

    #[tokio::test]
    async fn work_that_panics_is_an_error_and_gives_its_permit_back() {
        let texts = Texts::load(&[], 1, Memo::none()).expect("no models");
        for _ in 0..3 {
            let broken = texts.run(|| -> u32 { panic!("as the test wants") }).await;
            assert_eq!(broken, Err(TextError::Interrupted));
        }
        assert_eq!(texts.run(|| 7).await, Ok(7));
    }
}
