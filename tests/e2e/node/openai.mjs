// The official `openai` package for Node drives a cluster: models, chats, completions and responses,
// streamed and whole, and errors. Usage: node openai.mjs BASE_URL MODEL. Prints "ok" at the end.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const greedy = { model, temperature: 0, ignore_eos: true };

const ids = [];
for await (const one of client.models.list()) ids.push(one.id);
assert.deepEqual(ids, [model]);

const messages = [{ role: "user", content: "Why?" }];
const chat = await client.chat.completions.create({ ...greedy, messages, max_tokens: 12 });
assert.equal(chat.usage.completion_tokens, 12);
let text = "";
const chunks = await client.chat.completions.create({ ...greedy, messages, max_tokens: 12, stream: true });
for await (const chunk of chunks) text += chunk.choices[0]?.delta?.content ?? "";
assert.equal(text, chat.choices[0].message.content);

const prompt = [0, 964];
const completion = await client.completions.create({ ...greedy, prompt, max_tokens: 8 });
text = "";
const pieces = await client.completions.create({ ...greedy, prompt, max_tokens: 8, stream: true });
for await (const piece of pieces) text += piece.choices[0]?.text ?? "";
assert.equal(text, completion.choices[0].text);

const response = await client.responses.create({ ...greedy, input: "Why?", max_output_tokens: 12 });
assert.equal(response.output_text, chat.choices[0].message.content);
text = "";
let last;
const events = await client.responses.create({ ...greedy, input: "Why?", max_output_tokens: 12, stream: true });
for await (const event of events) {
  if (event.type === "response.output_text.delta") text += event.delta;
  last = event;
}
assert.equal(text, response.output_text);
assert.equal(last.type, "response.incomplete");

await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError);
await assert.rejects(client.responses.create({ model, input: "x", store: true }), OpenAI.BadRequestError);
console.log("ok");
