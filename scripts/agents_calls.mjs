// Agent libraries for Node against a server: `node agents_calls.mjs URL MODEL AGENT`. See `agents_calls.py`.
import { createInterface } from "node:readline";
import { readFileSync } from "node:fs";
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const TURNS = 20;
const [url, model] = process.argv.slice(2);
const value = { city: "Oslo", days: 2, rain: true };
const schema = z.object({ city: z.enum(["Oslo", "Rome"]), days: z.literal([1, 2, 3]), rain: z.boolean() });
const chats = createOpenAICompatible({ name: "teneral", baseURL: `${url}/v1`, supportsStructuredOutputs: true })(model);
const responses = createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" }).responses(model);
const models = [chats, responses];
const options = { maxRetries: 0 };
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});

const checks = {
  async chat() {
    for (const each of models) {
      assert.equal((await generateText({ ...options, model: each, prompt: "%%%Hi.%%%" })).text, "Hi.");
    }
  },
  async stream() {
    for (const each of models) {
      let text = "";
      for await (const piece of streamText({ ...options, model: each, prompt: "%%%Hi there.%%%" }).textStream) text += piece;
      assert.equal(text, "Hi there.");
    }
  },
  async structured() {
    const prompt = `Rain? %%%${JSON.stringify(value)}%%%`;
    for (const each of models) {
      const { output } = await generateText({ ...options, model: each, prompt, output: Output.object({ schema }) });
      assert.deepEqual(output, value);
    }
  },
  async tool() {
    const prompt = 'Weather? %%%CALL weather {"city": "Oslo"}||It is sunny in Oslo.%%%';
    const calling = { ...options, prompt, tools: { weather }, stopWhen: stepCountIs(4) };
    for (const each of models) {
      assert.equal((await generateText({ ...calling, model: each })).text, "It is sunny in Oslo.");
      assert.equal(await streamText({ ...calling, model: each }).text, "It is sunny in Oslo.");
    }
  },
  async session() {
    const messages = [];
    for (let number = 1; number <= TURNS; number++) {
      if (number === TURNS / 2) {
        console.log("RESTART");
        await lines.next();
      }
      messages.push({ role: "user", content: `turn ${number}: %%%I know #turns turns.%%%` });
      const answer = await generateText({ ...options, model: models[number % 2], messages });
      messages.push(...answer.response.messages);
      assert.equal(answer.text, `I know ${number} turns.`);
    }
  },
};

const manifest = new URL("node_modules/ai/package.json", import.meta.url);
console.log("VERSION", JSON.parse(readFileSync(manifest, "utf-8")).version);
for (const [name, check] of Object.entries(checks)) {
  let failure = "";
  try {
    await check();
  } catch (error) {
    failure = String(error.stack ?? error).slice(0, 1500);
  }
  console.log("CHECK", JSON.stringify({ [name]: failure }));
}
process.exit(0);
