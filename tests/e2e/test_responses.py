"""The `openai` package's `responses` on a cluster: whole, streamed, as a conversation, refused."""

import openai
import pytest

MODEL = "tiny-deepseek-v2"
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def respond(client, content, **options):
    return client.responses.create(model=MODEL, input=content, **GREEDY, **options)


def test_a_response_is_what_the_chat_of_it_is(client):
    response = respond(client, "Why?", max_output_tokens=12, store=False)
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Why?"}], max_tokens=12, **GREEDY
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 12
    assert response.store is False


def test_a_streamed_response_adds_up_to_the_whole(client):
    whole = respond(client, "Why?", max_output_tokens=12)
    events = list(respond(client, "Why?", max_output_tokens=12, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens == 12


def test_the_helper_for_streams_gives_the_last_response(client):
    options = {"model": MODEL, "input": "Why?", "max_output_tokens": 8, **GREEDY}
    with client.responses.stream(**options) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == respond(client, "Why?", max_output_tokens=8).output_text


def test_a_conversation_goes_on_with_the_output_of_before(client):
    first = respond(client, "Tell me of licences. " * 30, max_output_tokens=8)
    items = [{"role": "user", "content": "Tell me of licences. " * 30}]
    items += [item.model_dump() for item in first.output]
    items += [{"role": "user", "content": "And more?"}]
    second = respond(client, items, max_output_tokens=8)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"store": True},
        {"previous_response_id": "resp_1"},
        {"tools": [{"type": "web_search"}]},
        {"background": True},
        {"truncation": "auto"},
        {"max_output_tokens": 0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_not_offered_is_a_bad_request_that_names_it(client, options):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, "Why?", **options)
    assert caught.value.body["param"] == next(iter(options))
