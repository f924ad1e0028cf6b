//! From text to tokens: tokenizer and chat template of each configured model.
//!
//! Runs on blocking threads, at most `tokenize_parallel` at once, so that a long prompt never
//! holds up the reactor. Who waits for a thread is bounded by the requests that are let in. Text
//! that comes back is made by the engines, not here.

mod template;
mod tokenizer;

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::config::ModelConfig;
use crate::error::Error;

pub(crate) use template::ChatTemplate;
pub(crate) use tokenizer::{PromptTokenizer, SpecialTokens};

/// One model's way from text to tokens.
#[derive(Debug)]
pub(crate) struct ModelText {
    pub tokenizer: PromptTokenizer,
    /// Absent when the model has none: it then answers completions only.
    pub template: Option<ChatTemplate>,
}

/// What a client's text did not survive.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TextError {
    #[error("this model has no chat template; use /v1/completions")]
    NoTemplate,
    /// The template refused the messages (`raise_exception`) or failed on them.
    #[error("the model's chat template does not accept these messages: {0}")]
    Template(String),
    #[error("the prompt could not be tokenized: {0}")]
    Tokenize(String),
    /// A thread panicked or the runtime is shutting down.
    #[error("tokenizing was interrupted")]
    Interrupted,
}

/// All configured models, and the bound on work for them.
#[derive(Debug)]
pub(crate) struct Texts {
    models: BTreeMap<String, Arc<ModelText>>,
    permits: Arc<Semaphore>,
}

impl Texts {
    /// Reads the files of every model; blocks while it does.
    pub fn load(models: &[ModelConfig], parallel: usize) -> Result<Texts, Error> {
        let load = |config: &ModelConfig| {
            let (tokenizer, special) = PromptTokenizer::load(&config.path)?;
            let template = ChatTemplate::load(&config.path, &special)?;
            Ok(Arc::new(ModelText { tokenizer, template }))
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

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.models.keys().map(String::as_str)
    }

    pub fn model(&self, name: &str) -> Option<Arc<ModelText>> {
        self.models.get(name).cloned()
    }

    /// Runs `work` on a blocking thread when one of the permits is free.
    pub async fn run<T, F>(&self, work: F) -> Result<T, TextError>
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
