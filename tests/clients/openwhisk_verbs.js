// Drives a gateway with OpenWhisk's npm client, unmodified, and prints what it was told: one JSON object.
// THAW_TEST_APIHOST and THAW_TEST_AUTH name the platform; tests/e2e/test_functions.py starts one and reads the output.
const openwhisk = require('openwhisk')

const ECHO = 'def main(args):\n    return args\n'
const FAILS = 'def main(args):\n    return {"error": {"error": "no such luck"}}\n'
const FEED = 'def main(args):\n    return {"event": args["lifecycleEvent"], "trigger": args["triggerName"], "cron": args.get("cron")}\n'
const python = (code, more = {}) => ({ exec: { kind: 'python:default', code }, ...more })
const pairs = values => Object.entries(values).map(([key, value]) => ({ key, value }))
const refusal = promise => promise.then(() => 'accepted', e => [e.statusCode, e.message.split(' --> ')[1]])

async function recordOf (ow, id) {
  for (let left = 100; left > 0; left--) { // the client has no call that waits for a record
    try { return await ow.activations.get(id) } catch (e) {
      if (e.statusCode !== 404) throw e
      await new Promise(resolve => setTimeout(resolve, 100))
    }
  }
  throw new Error(`no record of ${id}`)
}

async function main () {
  const ow = openwhisk({ apihost: process.env.THAW_TEST_APIHOST, api_key: process.env.THAW_TEST_AUTH })
  const said = {}
  said.namespaces = await ow.namespaces.list()

  said.created = (await ow.actions.create({ name: 'js', action: ECHO, kind: 'python:3.11', params: { bound: 1 }, limits: { timeout: 9000, logs: 1 } })).version
  said.again = await refusal(ow.actions.create({ name: 'js', action: ECHO, kind: 'python:3.11' }))
  said.updated = (await ow.actions.update({ name: 'js', params: { bound: 2 } })).version
  said.result = await ow.actions.invoke({ name: 'js', params: { a: 1 }, blocking: true, result: true })
  said.limits = (await ow.actions.get('js')).limits
  said.missing = await refusal(ow.actions.get('nothing'))
  await ow.actions.create({ name: 'fails', action: FAILS, kind: 'python:3.11' })
  said.failed = await refusal(ow.actions.invoke({ name: 'fails', blocking: true }))

  const { activationId } = await ow.actions.invoke({ name: 'js', params: { later: true } })
  said.later = (await recordOf(ow, activationId)).response.result
  said.logs = (await ow.activations.logs(activationId)).logs
  said.listed = (await ow.activations.list({ name: 'js', limit: 1 })).map(a => a.name)

  await ow.packages.create({ name: 'jspkg', package: { parameters: pairs({ from: 'package' }) } })
  await ow.actions.create({ name: 'jspkg/act', action: python(ECHO) })
  await ow.packages.create({ name: 'jsbound', package: { binding: { namespace: '_', name: 'jspkg' }, parameters: pairs({ bound: 'too' }) } })
  said.bound = await ow.actions.invoke({ name: 'jsbound/act', blocking: true, result: true })
  said.packages = (await ow.packages.list()).map(p => p.name).sort()
  said.package = (await ow.packages.get('jspkg')).actions.map(a => a.name)

  await ow.actions.create({ name: 'jsseq', sequence: ['/_/js', '/_/jspkg/act'] })
  said.sequence = await ow.actions.invoke({ name: 'jsseq', params: { a: 2 }, blocking: true, result: true })

  await ow.triggers.create({ name: 'jst', trigger: { parameters: pairs({ from: 'trigger' }) } })
  said.unheard = await ow.triggers.invoke({ name: 'jst' })
  await ow.rules.create({ name: 'jsr', trigger: 'jst', action: 'js' })
  await ow.rules.disable({ name: 'jsr' })
  said.disabled = (await ow.rules.get('jsr')).status
  await ow.rules.enable({ name: 'jsr' })
  const fired = await ow.triggers.invoke({ name: 'jst', params: { b: 3 } })
  const line = JSON.parse((await recordOf(ow, fired.activationId)).logs[0])
  said.fired = (await recordOf(ow, line.activationId)).response.result
  said.notEmpty = await refusal(ow.packages.delete('jspkg'))

  await ow.actions.create({ name: 'jspkg/feed', action: python(FEED, { annotations: pairs({ feed: true }) }) })
  said.feed = (await ow.feeds.create({ name: 'jspkg/feed', trigger: 'jst', params: { cron: '*' } })).response.result

  for (const rule of await ow.rules.list()) await ow.rules.delete(rule.name)
  for (const trigger of await ow.triggers.list()) await ow.triggers.delete(trigger.name)
  for (const name of ['jsseq', 'fails', 'js', 'jspkg/feed', 'jspkg/act']) await ow.actions.delete(name)
  for (const name of ['jsbound', 'jspkg']) await ow.packages.delete(name)
  said.left = [await ow.rules.list(), await ow.triggers.list(), await ow.packages.list()]
  console.log(JSON.stringify(said))
}

main().catch(e => { console.error(e); process.exit(1) })
