"""Requests that schemathesis makes up from the OpenAPI document, good ones and bad ones, always the
same: none is answered with a status that says that the server failed, or that the document lacks."""

import itertools

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

MODEL = "tiny-deepseek-v2"
EXAMPLES = 20
# Every second request gets the name of the served model and the id of a persisted context. A generated name or id
# is unknown, and the conductor would reject the request before it checks the rest.
KNOWN_EVERY = 2
# The engines here make none.
NEVER_ANSWERED = "/v1/embeddings"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="session")
def operations(cluster):
    schema = schemathesis.openapi.from_url(f"{cluster.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    assert len(found) >= 9
    return found


@pytest.fixture
def keep(http):
    """Keeps a context, always the same one, and answers its id."""

    def keep():
        manual = [{"role": "system", "content": "The manual. " * 40}]
        answer = http.post("/v1/contexts", json={"model": MODEL, "messages": manual, "ttl_seconds": 600})
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    return keep


def bounded(case):
    """Whatever is asked for ends soon."""
    if isinstance(case.body, dict):
        for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(case.body.get(limit), int):
                case.body[limit] = min(case.body[limit], 4)


def known(case, context):
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = MODEL
    if "id" in case.path_parameters:
        case.path_parameters["id"] = context
    if "name" in case.path_parameters:
        case.path_parameters["name"] = MODEL


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_made_up_requests_are_answered_as_the_document_says(operations, keep, mode):
    answered = set()
    for operation in operations:
        # Only bodies can be wrong.
        if mode.is_negative and operation.method != "post":
            continue

        made = itertools.count()
        context = keep()

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case):
            bounded(case)
            if next(made) % KNOWN_EVERY == 0:
                known(case, context)
            response = case.call(timeout=120)
            case.validate_response(response, checks=CHECKS)
            answered.add((operation.label, response.status_code))

        check()
    assert 400 in {status for _, status in answered}
    good = {label for label, status in answered if status == 200}
    asked = {operation.label for operation in operations if operation.method != "post"}
    assert mode.is_negative or asked <= good, sorted(answered)


def lengthened(example):
    """The example with a long text for each ellipsis, as a user of the document would send it."""
    if isinstance(example, dict):
        return {key: lengthened(value) for key, value in example.items()}
    if isinstance(example, list):
        return [lengthened(value) for value in example]
    return example.replace("...", "word " * 100) if isinstance(example, str) else example


def test_the_examples_of_the_document_are_answered_as_it_says(http, keep):
    document = http.get("/openapi.json").json()
    tried = 0
    for path, item in document["paths"].items():
        if "post" not in item or path == NEVER_ANSWERED:
            continue
        body = item["post"]["requestBody"]["content"]["application/json"]["example"]
        body = lengthened(body) | ({"model": MODEL} if "model" in body else {})
        answer = http.post(path.replace("{id}", keep()), json=body)
        assert answer.status_code == 200, (path, body, answer.text)
        tried += 1
    assert tried >= 5
