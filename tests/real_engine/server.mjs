#!/usr/bin/env node
// An OpenAI-style server on llama.cpp's own code (npm's node-llama-cpp), small enough for CI.
//
// It stands for a real engine in the tests: real loading, real tokens and counts, several slots and a queue
// behind them, drafts by lookup in the prompt, a drain on SIGTERM, and an exit status when it cannot load.
// Nothing here is part of the product.
//
//   node server.mjs --model FILE.gguf --port N [--modules DIR] [--host A] [--served-name NAME] [--ctx N]
//        [--batch N] [--parallel N] [--threads N] [--draft N] [--kv-type f16|q8_0] [--api-key-file FILE]
//        [--drain-s S]
import fs from 'node:fs'
import http from 'node:http'
import path from 'node:path'
import { pathToFileURL } from 'node:url'
import { parseArgs } from 'node:util'

const USAGE = fs.readFileSync(new URL(import.meta.url), 'utf8').split('\n')
  .filter((line) => line.startsWith('//   ') || line.startsWith('//        ')).map((line) => line.slice(5)).join('\n')

function die(message, status = 1) {
  console.error(`error: ${message}`)
  process.exit(status)
}

let options
try {
  options = parseArgs({
    options: {
      modules: { type: 'string', default: path.dirname(new URL(import.meta.url).pathname) },
      model: { type: 'string' },
      host: { type: 'string', default: '127.0.0.1' },
      port: { type: 'string', default: '8080' },
      'served-name': { type: 'string', default: 'smollm2' },
      ctx: { type: 'string', default: '2048' },
      batch: { type: 'string', default: '256' },
      parallel: { type: 'string', default: '4' },
      threads: { type: 'string', default: '1' },
      draft: { type: 'string', default: '0' },
      'kv-type': { type: 'string', default: 'f16' },
      'api-key-file': { type: 'string' },
      'drain-s': { type: 'string', default: '30' },
      help: { type: 'boolean', short: 'h', default: false },
    },
  }).values
} catch (error) {
  die(error.message, 2)
}
if (options.help) {
  console.log(USAGE)
  process.exit(0)
}
const number = (name) => {
  const value = Number(options[name])
  if (!Number.isInteger(value) || value < 0) die(`--${name} wants a whole number, not ${options[name]}`, 2)
  return value
}
const [ctx, batch, parallel, threads, draft, port] = ['ctx', 'batch', 'parallel', 'threads', 'draft', 'port'].map(number)
const drainS = Number(options['drain-s'])
const apiKey = options['api-key-file'] ? fs.readFileSync(options['api-key-file'], 'utf8').trim() : null
if (!options.model) die('--model is missing', 2)

const state = { model: null, draining: false, running: 0, served: 0, free: [], waiting: [] }
const name = options['served-name']

const server = http.createServer((request, response) => {
  handle(request, response).catch((error) => fail(response, 500, error.message))
})
server.keepAliveTimeout = 60_000
server.on('error', (error) => die(`cannot listen on ${options.host}:${port}: ${error.message}`))
server.listen(port, options.host, () => console.log(`listening on ${options.host}:${server.address().port}`))

process.on('SIGTERM', drain)
process.on('SIGINT', drain)

load().catch((error) => die(`cannot load ${options.model}: ${error.message}`))

async function load() {
  if (!fs.existsSync(options.model)) throw new Error('no such file')
  if (!['f16', 'q8_0'].includes(options['kv-type'])) throw new Error(`unknown KV cache type ${options['kv-type']}`)
  const entry = path.join(path.resolve(options.modules), 'node_modules/node-llama-cpp/dist/index.js')
  const { getLlama, InputLookupTokenPredictor } = await import(pathToFileURL(entry))
  const llama = await getLlama({ build: 'never', gpu: false, logLevel: 'error', maxThreads: threads })
  const model = await llama.loadModel({ modelPath: options.model })
  const kv = options['kv-type'] === 'f16' ? {} : { experimentalKvCacheKeyType: 'Q8_0', experimentalKvCacheValueType: 'Q8_0', flashAttention: true }
  const context = await model.createContext({ contextSize: ctx, batchSize: batch, sequences: parallel, threads, ...kv })
  for (let slot = 0; slot < parallel; slot += 1) {
    const tokenPredictor = draft ? new InputLookupTokenPredictor({ patternLength: { min: 2 }, predictionLength: { max: draft } }) : undefined
    state.free.push(context.getSequence({ tokenPredictor }))
  }
  state.model = model
  console.log(`loaded ${options.model}: ctx ${context.contextSize}, batch ${batch}, ${parallel} slots, ${threads} threads, draft ${draft}`)
}

// One request a slot; who comes later waits in line.
function slot() {
  const sequence = state.free.pop()
  return sequence ? Promise.resolve(sequence) : new Promise((resolve) => state.waiting.push(resolve))
}

function giveBack(sequence) {
  const next = state.waiting.shift()
  if (next) next(sequence)
  else state.free.push(sequence)
}

async function handle(request, response) {
  const { pathname } = new URL(request.url, 'http://localhost')
  if (pathname === '/health') {
    const status = state.draining ? 'draining' : state.model ? 'ok' : 'loading model'
    return json(response, status === 'ok' ? 200 : 503, { status })
  }
  if (apiKey !== null && request.headers.authorization !== `Bearer ${apiKey}`) return fail(response, 401, 'wrong or missing API key')
  if (pathname === '/v1/models') return json(response, 200, { object: 'list', data: [{ id: name, object: 'model', owned_by: 'tests' }] })
  if (pathname === '/stats') return json(response, 200, { running: state.running, served: state.served })
  if (request.method !== 'POST' || !['/v1/completions', '/v1/chat/completions'].includes(pathname)) return fail(response, 404, `no ${pathname}`)
  if (!state.model || state.draining) return fail(response, 503, state.draining ? 'draining' : 'loading model')
  let body
  try {
    body = JSON.parse(await read(request))
  } catch {
    return fail(response, 400, 'the body is no JSON')
  }
  if (body.model !== undefined && body.model !== name) return fail(response, 404, `the model ${body.model} does not exist`)
  const chat = pathname === '/v1/chat/completions'
  let prompt = body.prompt
  if (chat) {
    if (!Array.isArray(body.messages) || !body.messages.length) return fail(response, 400, 'messages is missing')
    // The model's own form (ChatML), without the system prompt that its template would add.
    prompt = [...body.messages, { role: 'assistant' }].map((m) => `<|im_start|>${m.role}\n${m.content === undefined ? '' : `${m.content}<|im_end|>\n`}`).join('')
  }
  if (typeof prompt !== 'string' || !prompt) return fail(response, 400, 'prompt is missing')
  const promptTokens = state.model.tokenize(prompt, chat)
  const maxTokens = body.max_completion_tokens ?? body.max_tokens ?? 128
  if (!Number.isInteger(maxTokens) || maxTokens < 1) return fail(response, 400, 'max_tokens must be a whole number above 0')
  if (promptTokens.length + maxTokens > ctx) return fail(response, 400, `${promptTokens.length} + ${maxTokens} tokens exceed the context of ${ctx}`)
  state.running += 1
  try {
    await generate(response, { chat, body, promptTokens, maxTokens })
    state.served += 1
  } finally {
    state.running -= 1
  }
}

async function generate(response, { chat, body, promptTokens, maxTokens }) {
  const id = `${chat ? 'chatcmpl' : 'cmpl'}-${state.served}-${state.running}`
  const wantsUsage = Boolean(body.stream_options?.include_usage)
  const continuous = wantsUsage && Boolean(body.stream_options?.continuous_usage_stats)
  const usage = (tokens) => ({ prompt_tokens: promptTokens.length, completion_tokens: tokens, total_tokens: promptTokens.length + tokens })
  const object = chat ? 'chat.completion.chunk' : 'text_completion'
  const chunk = (choice, more) => ({ id, object, created: 0, model: name, choices: choice ? [{ index: 0, ...choice }] : [], ...more })
  const piece = (text) => (chat ? { delta: { content: text }, finish_reason: null } : { text, finish_reason: null })
  let tokens = 0
  let gone = false
  const send = (data) => { if (!gone) response.write(`data: ${typeof data === 'string' ? data : JSON.stringify(data)}\n\n`) }
  if (body.stream) {
    response.writeHead(200, { 'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache' })
    if (chat) send(chunk({ delta: { role: 'assistant', content: '' }, finish_reason: null }, continuous ? { usage: usage(0) } : {}))
  }
  response.on('close', () => { gone = !response.writableFinished })
  const began = performance.now()
  const sequence = await slot()
  const said = []
  let [finish, held, first] = ['length', [], 0]
  const before = { ...sequence.tokenPredictions }
  try {
    await sequence.clearHistory()
    sequence.tokenPredictor?.updateInputTokens(promptTokens)
    const drawn = { temperature: body.temperature ?? 1, topP: body.top_p ?? 1, seed: body.seed, yieldEogToken: true }
    for await (const token of sequence.evaluate(promptTokens, drawn)) {
      if (!tokens) first = performance.now()
      tokens += 1
      const ended = state.model.isEogToken(token)
      if (!ended) held.push(token)
      // A character may be cut between tokens: hold them back until it is whole.
      let text = state.model.detokenize(held)
      if (text.endsWith('\ufffd') && held.length < 8 && tokens < maxTokens) text = ''
      if (text) {
        held = []
        said.push(text)
        if (body.stream) send(chunk(piece(text), continuous ? { usage: usage(tokens) } : {}))
      }
      if (ended && !body.ignore_eos) finish = 'stop'
      if (finish === 'stop' || gone || tokens >= maxTokens) break
    }
  } finally {
    giveBack(sequence)
  }
  const after = sequence.tokenPredictions
  const spent = performance.now() - first
  const accepted = after.validated - before.validated
  const timings = {
    prompt_n: promptTokens.length, prompt_ms: first - began, predicted_n: tokens, predicted_ms: spent,
    predicted_per_second: ((tokens - 1) / spent) * 1000,
    ...(draft ? { draft_n: accepted + after.refuted - before.refuted, draft_n_accepted: accepted } : {}),
  }
  const counted = usage(tokens)
  const text = said.join('')
  if (!body.stream) {
    const choice = chat
      ? { index: 0, message: { role: 'assistant', content: text }, finish_reason: finish }
      : { index: 0, text, finish_reason: finish }
    return json(response, 200, { id, object: chat ? 'chat.completion' : 'text_completion', created: 0, model: name, choices: [choice], usage: counted, timings })
  }
  send(chunk(chat ? { delta: {}, finish_reason: finish } : { text: '', finish_reason: finish }))
  if (wantsUsage) send(chunk(null, { usage: counted, timings }))
  send('[DONE]')
  response.end()
}

function read(request) {
  return new Promise((resolve, reject) => {
    const parts = []
    request.on('data', (part) => parts.push(part))
    request.on('end', () => resolve(Buffer.concat(parts).toString('utf8')))
    request.on('error', reject)
  })
}

function json(response, status, body) {
  const text = JSON.stringify(body)
  response.writeHead(status, { 'Content-Type': 'application/json', 'Content-Length': Buffer.byteLength(text) })
  response.end(text)
}

function fail(response, status, message) {
  if (!response.headersSent) return json(response, status, { error: { message, type: 'invalid_request_error', code: status } })
  response.destroy()
}

function drain() {
  if (state.draining) return
  state.draining = true
  console.log(`draining ${state.running} requests`)
  server.close()
  server.closeIdleConnections()
  const due = Date.now() + drainS * 1000
  const look = () => {
    if (state.running > 0 && Date.now() < due) return
    console.log(state.running ? `left ${state.running} requests` : 'drained')
    process.exit(0)
  }
  look()
  setInterval(look, 20)
}
