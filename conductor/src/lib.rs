//! The scheduler and the OpenAI-compatible front door
