//! A model's chat template: Jinja as model publishers write it, rendered in a closed environment
//! (no files, no includes). The template is the operator's, the messages are the client's.

use std::path::Path;

use minijinja::value::Kwargs;
use minijinja::{Environment, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value};

use super::{SpecialTokens, TextError};

const NAME: &str = "chat_template";

/// A parsed template with the special tokens it may name.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    special: SpecialTokens,
    knows_developer: bool,
}

impl ChatTemplate {
    /// `chat_template.jinja` when there is one, else `chat_template` of `tokenizer_config.json`;
    /// `None` when the model has neither.
    pub(crate) fn load(
        directory: &Path,
        special: &SpecialTokens,
    ) -> Result<Option<ChatTemplate>, String> {
        let path = directory.join("chat_template.jinja");
        let source = match read_optional(&path)? {
            Some(source) => Some(source),
            None => read_json(&directory.join("tokenizer_config.json"))?
                .as_ref()
                .and_then(|config| config.get("chat_template"))
                .and_then(default_template),
        };
        source.map(|source| ChatTemplate::parse(source, special.clone())).transpose()
    }

    /// Parses a template's text.
    pub(crate) fn parse(source: String, special: SpecialTokens) -> Result<ChatTemplate, String> {
        let mut environment = Environment::new();
        // As the transformers library sets its Jinja: publishers rely on both.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        let knows_developer = source.contains("developer");
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| format!("cannot parse the chat template: {error:#}"))?;
        Ok(ChatTemplate { environment, special, knows_developer })
    }

    /// Whether the role `developer` means something to it; otherwise it is given as `system`.
    pub(crate) fn knows_developer(&self) -> bool {
        self.knows_developer
    }

    /// The prompt text of a chat. `extra` are variables that the client passes to the template;
    /// they cannot replace the ones set here.
    pub(crate) fn render(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, TextError> {
        let mut context = extra.clone();
        let mut set = |name: &str, value: Value| context.insert(name.to_owned(), value);
        set("messages", Value::from(messages));
        set("add_generation_prompt", Value::from(add_generation_prompt));
        set("tools", Value::Null);
        for (name, token) in [
            ("bos_token", &self.special.bos),
            ("eos_token", &self.special.eos),
            ("pad_token", &self.special.pad),
            ("unk_token", &self.special.unk),
        ] {
            set(name, token.clone().map_or_else(|| Value::from(""), Value::from));
        }
        let template = self.environment.get_template(NAME);
        template.and_then(|template| template.render(&context)).map_err(|error| {
            let detail = error.detail().map(str::to_owned);
            TextError::Template(detail.unwrap_or_else(|| error.to_string()))
        })
    }
}

/// How a template refuses messages.
fn raise_exception(message: String) -> Result<String, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// `tojson` as the transformers library has it: no HTML escapes, and spaces after `,` and `:`.
fn to_json(value: minijinja::Value, options: Kwargs) -> Result<minijinja::Value, minijinja::Error> {
    let failed = |error: serde_json::Error| {
        minijinja::Error::new(ErrorKind::BadSerialization, error.to_string())
    };
    let indent: Option<usize> = options.get("indent")?;
    // Others are allowed and change nothing for what is passed in here.
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    let _ = options.get::<Option<bool>>("sort_keys")?;
    options.assert_all_used()?;
    let json = match indent {
        Some(width) => {
            // A template is trusted, its arguments may come from a client.
            let indent = " ".repeat(width.min(16));
            let mut out = Vec::new();
            let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            let mut writer = serde_json::Serializer::with_formatter(&mut out, formatter);
            serde::Serialize::serialize(&value, &mut writer).map_err(failed)?;
            out
        }
        None => {
            let mut out = Vec::new();
            let mut writer = serde_json::Serializer::with_formatter(&mut out, Spaced);
            serde::Serialize::serialize(&value, &mut writer).map_err(failed)?;
            out
        }
    };
    let json = String::from_utf8_lossy(&json).into_owned();
    Ok(minijinja::Value::from_safe_string(json))
}

/// JSON on one line as Python writes it.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// A string, or a list of `{name, template}` of which the one named `default` is meant.
fn default_template(value: &Value) -> Option<String> {
    if let Some(source) = value.as_str() {
        return Some(source.to_owned());
    }
    let named = value.as_array()?.iter().find(|entry| entry["name"] == "default")?;
    named["template"].as_str().map(str::to_owned)
}

fn read_optional(path: &Path) -> Result<Option<String>, String> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("cannot read {path:?}: {error}")),
    }
}

/// A JSON file that may be missing.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>, String> {
    let Some(text) = read_optional(path)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(|e| format!("cannot parse {path:?}: {e}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn special() -> SpecialTokens {
        SpecialTokens {
            bos: Some("<s>".into()),
            eos: Some("</s>".into()),
            ..SpecialTokens::default()
        }
    }

    fn check(source: &str, messages: Value, want: Result<&str, &str>) {
        let template = ChatTemplate::parse(source.to_owned(), special()).expect("parses");
        let messages = messages.as_array().expect("a list").clone();
        let got = template.render(&messages, true, &Map::new());
        let want = want.map(str::to_owned).map_err(|text| TextError::Template(text.to_owned()));
        assert_eq!(got, want, "template {source:?}");
    }

    #[test]
    fn templates_render_as_their_publishers_mean_them() {
        let hello = || json!([{"role": "user", "content": " Hello "}]);
        check("{{ bos_token }}{{ messages[0].content }}", hello(), Ok("<s> Hello "));
        // Python's methods.
        check("{{ messages[0]['content'].strip() }}", hello(), Ok("Hello"));
        check("{{ messages[0].content.split('l')|length }}", hello(), Ok("3"));
        // Blocks take their line with them.
        check(
            "{% for m in messages %}\n  {% if m.role == 'user' %}\nX\n  {% endif %}\n{% endfor %}\n",
            hello(),
            Ok("X\n"),
        );
        check("{% if add_generation_prompt %}A{% endif %}{{ eos_token }}", hello(), Ok("A</s>"));
        check(
            "{% if tools is not none %}T{% endif %}{% if tools %}t{% endif %}-",
            hello(),
            Ok("-"),
        );
        check("{{ unheard_of }}{{ pad_token }}|", hello(), Ok("|"));
        check(
            "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
            json!([{"role": "a", "content": ""}, {"role": "b", "content": ""}]),
            Ok("a"),
        );
        check(
            "{{ messages[0] | tojson }}",
            json!([{"a": [1, "<&>'"]}]),
            Ok("{\"a\": [1, \"<&>'\"]}"),
        );
        check("{{ messages[0] | tojson(indent=2) }}", json!([{"a": 1}]), Ok("{\n  \"a\": 1\n}"));
    }

    #[test]
    fn what_a_template_refuses_is_told_in_its_own_words() {
        let source = "{{ raise_exception('roles must alternate') }}";
        check(source, json!([{"role": "user", "content": ""}]), Err("roles must alternate"));
    }

    #[test]
    fn a_client_cannot_replace_what_the_conductor_sets() {
        let source = "{{ bos_token }}{{ thinking }}{{ messages|length }}".to_owned();
        let template = ChatTemplate::parse(source, special()).expect("parses");
        let extra = json!({"bos_token": "evil", "messages": [1, 2, 3], "thinking": "on"});
        let extra = extra.as_object().expect("an object");
        assert_eq!(template.render(&[json!({})], true, extra), Ok("<s>on1".to_owned()));
    }

    #[test]
    fn the_default_one_of_several_templates_is_used() {
        let list =
            json!([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]);
        assert_eq!(default_template(&list).as_deref(), Some("D"));
        assert_eq!(default_template(&json!("S")).as_deref(), Some("S"));
        assert_eq!(default_template(&json!([])), None);
    }
}
