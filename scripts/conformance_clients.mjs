// The `openai` package for Node against the server at URL: a structured answer, or a streamed call of a function.
//
//     node conformance_clients.mjs URL structured|call
//
// Prints the answer as JSON with the package's version; throws where the answer is invalid. Lies in the folder whose
// `node_modules` hold `openai` and `zod` when it runs: `scripts/conformance-clients` copies it there.
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, kind] = process.argv.slice(2);
const Weather = z.object({
  city: z.enum(["Oslo", "Rome"]),
  days: z.union([z.literal(1), z.literal(2), z.literal(3)]),
  rain: z.boolean(),
});
const client = new OpenAI({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const request = {
  model: "smollm2",
  messages: [{ role: "user", content: "Will it rain in Oslo in the next two days?" }],
  max_tokens: 200,
};
let answer;
if (kind === "structured") {
  const completion = await client.chat.completions.parse({
    ...request,
    response_format: zodResponseFormat(Weather, "weather"),
  });
  answer = completion.choices[0].message.parsed;
} else {
  const stream = client.chat.completions.stream({
    ...request,
    tools: [zodFunction({ name: "weather", parameters: Weather })],
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const [choice] = (await stream.finalChatCompletion()).choices;
  if (choice.finish_reason !== "tool_calls") throw new Error(`finish_reason ${choice.finish_reason}`);
  answer = choice.message.tool_calls[0].function.parsed_arguments;
}
const { version } = JSON.parse(readFileSync(new URL("node_modules/openai/package.json", import.meta.url)));
console.log(JSON.stringify({ version, answer: Weather.parse(answer) }));
