// Drives a gateway with OpenAI's npm client, unmodified, and prints what it was told: one JSON object.
// THAW_TEST_APIHOST and THAW_TEST_AUTH name the platform; tests/e2e/test_openai_clients.py starts one and reads the output.
const OpenAI = require('openai')

const NUMBER = { type: 'integer', maximum: 99 }
const PAIR = { type: 'object', properties: { a: NUMBER, b: NUMBER }, required: ['a', 'b'], additionalProperties: false }
const CITY = { type: 'object', properties: { name: { enum: ['Paris', 'Rome'] } }, required: ['name'], additionalProperties: false }
const asked = content => [{ role: 'user', content }]
const refusal = promise => promise.then(() => 'accepted', e => [e.status, e.param, e.code])

async function main () {
  const client = new OpenAI({ baseURL: `${process.env.THAW_TEST_APIHOST}/v1`, apiKey: process.env.THAW_TEST_AUTH, maxRetries: 0 })
  const chat = { model: 'chat', temperature: 0 }
  const said = {}
  said.models = (await client.models.list()).data.map(model => model.id)

  const whole = await client.chat.completions.create({ ...chat, messages: asked('Hello'), max_tokens: 4 })
  said.whole = whole.choices[0].message.content
  said.streamed = ''
  for await (const chunk of await client.chat.completions.create({ ...chat, messages: asked('Hello'), max_tokens: 4, stream: true })) {
    said.streamed += chunk.choices[0].delta.content ?? ''
  }
  const text = await client.completions.create({ ...chat, prompt: ['One', 'Two'], max_tokens: 2 })
  said.texts = text.choices.length

  const form = { type: 'json_schema', json_schema: { name: 'city', schema: CITY } }
  const city = await client.chat.completions.create({ ...chat, messages: asked('Paris?'), response_format: form, max_tokens: 64 })
  said.city = Object.keys(JSON.parse(city.choices[0].message.content))
  const tools = [{ type: 'function', function: { name: 'add', parameters: PAIR } }]
  const called = await client.chat.completions.create({ ...chat, messages: asked('Add 3 and 4.'), tools, tool_choice: 'required', parallel_tool_calls: false, max_tokens: 96 })
  said.called = called.choices[0].message.tool_calls.map(call => [call.function.name, Object.keys(JSON.parse(call.function.arguments)).sort()])

  const response = await client.responses.create({ ...chat, input: 'Hello', max_output_tokens: 4 })
  said.response = [response.status, response.output_text === said.whole]
  const stream = client.responses.stream({ ...chat, input: asked('Paris?'), text: { format: { type: 'json_schema', name: 'city', schema: CITY } }, max_output_tokens: 64 })
  said.deltas = ''
  stream.on('response.output_text.delta', event => { said.deltas += event.delta })
  said.final = (await stream.finalResponse()).output_text === said.deltas

  said.kept = await refusal(client.responses.create({ ...chat, input: 'x', store: true }))
  said.unknown = await refusal(client.chat.completions.create({ ...chat, messages: asked('x'), frobnicate: 1 }))
  said.missing = await refusal(client.chat.completions.create({ model: 'nope', messages: asked('x') }))
  console.log(JSON.stringify(said))
}

main().catch(e => { console.error(e); process.exit(1) })
