// A member of a swarm by js-libp2p, written from docs/wire.md and docs/vectors alone.
//
//     node peer.mjs ADDRESS TOPIC VECTORS [LISTEN [ANNOUNCE [PORT]]]
//
// A member's multiaddress, /swarmd/1/…, docs/vectors; where it listens, with commas, and where others dial it:
// js-libp2p tells no address that nobody has confirmed; the port that it dials from, for holes. Node cannot dial
// from a port that it listens on.
//
// It joins, says who it is and who it met, and then does what each line of its input says: publish, share,
// provide, find, ask, askAt, connections, reservations, addresses, subscribers, punching. It prints one JSON
// document a line. It relays, and is reached through relays and by hole punching.
import { readFileSync } from 'node:fs'
import { createHash } from 'node:crypto'
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { circuitRelayServer, circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { generateKeyPairFromSeed, publicKeyFromRaw } from '@libp2p/crypto/keys'
import { dcutr } from '@libp2p/dcutr'
import { gossipsub } from '@libp2p/gossipsub'
import { identify, identifyPush } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { peerIdFromString } from '@libp2p/peer-id'
import { byteStream } from '@libp2p/utils'
import { multiaddr } from '@multiformats/multiaddr'
import { decode, encode } from '@msgpack/msgpack'
import { createLibp2p } from 'libp2p'
import { CID } from 'multiformats/cid'
import * as multihash from 'multiformats/hashes/digest'

// Node 20 lacks it.
Promise.withResolvers ??= function () {
  let parts
  const promise = new Promise((resolve, reject) => { parts = { resolve, reject } })
  return { promise, ...parts }
}

const ASK = '/swarmd/ask/1'
const [address, topic, vectors, listen = '/ip4/127.0.0.1/tcp/0', announce, port] = process.argv.slice(2)
const say = document => console.log(JSON.stringify(document))
const hex = bytes => Buffer.from(bytes).toString('hex')
const unhex = text => new Uint8Array(Buffer.from(text, 'hex'))
const sha256 = data => createHash('sha256').update(data).digest()
const stored = name => JSON.parse(readFileSync(`${vectors}/${name}.json`, 'utf8'))

// Frames.

const DOMAIN = Buffer.concat([Buffer.from('swarmd'), Buffer.from([0, 15]), Buffer.from('swarmd frame v1')])
const swarmId = sha256(topic).subarray(0, 16)

async function seal (key, swarm, sequence, ms, kind, body) {
  const fields = ['swarmd', 1, new Uint8Array(swarm), key.publicKey.raw, sequence, ms, kind, body]
  // The signed part is the array of nine without its last: the header says nine.
  const signed = Buffer.from(encode([...fields, new Uint8Array(64)])).subarray(0, -66)
  const signature = new Uint8Array(await key.sign(Buffer.concat([DOMAIN, signed])))
  return new Uint8Array(Buffer.concat([signed, encode(signature)]))
}

async function open (frame, swarm) {
  const fields = decode(frame)
  if (!Array.isArray(fields) || fields.length !== 9) throw new Error('not a frame')
  const [tag, version, id, author,,,,, signature] = fields
  if (tag !== 'swarmd' || version !== 1 || hex(encode(fields)) !== hex(frame)) throw new Error('not a frame')
  if (hex(id) !== hex(swarm)) throw new Error('of another swarm')
  const signed = Buffer.concat([DOMAIN, frame.subarray(0, -66)])
  if (!await publicKeyFromRaw(author).verify(signed, signature)) throw new Error('bad signature')
  return fields
}

// The stored frames are made anew and read; returns how many.
async function checkVectors () {
  const key = await generateKeyPairFromSeed('Ed25519', unhex(stored('keys').good[0].seed))
  const { good, bad } = stored('frames')
  for (const { frame, swarm_id: swarm, value } of good) {
    const made = await seal(key, unhex(swarm), value[4], value[5], value[6], unhex(value[7]))
    if (hex(made) !== frame) throw new Error(`made ${hex(made)} for ${frame}`)
    await open(unhex(frame), unhex(swarm))
  }
  const ours = bad.filter(({ reason }) => ['of another swarm', 'bad signature'].includes(reason))
  for (const { frame, swarm_id: swarm, wrong, reason } of ours) {
    const said = await open(unhex(frame), unhex(swarm)).then(() => '', error => error.message)
    if (said !== reason) throw new Error(`${wrong}: ${said}`)
  }
  return good.length + ours.length
}

// Questions.

async function readMessage (bytes) {
  const length = Buffer.from((await bytes.read({ bytes: 4 })).subarray()).readUInt32BE()
  return length ? (await bytes.read({ bytes: length })).subarray() : new Uint8Array()
}

async function writeMessage (bytes, message) {
  const length = Buffer.alloc(4)
  length.writeUInt32BE(message.length)
  await bytes.write(new Uint8Array(Buffer.concat([length, message])))
}

const blob = stored('blobs').good[0]

function answer (question) {
  if (question[0] !== 1) return new Uint8Array() // A type that it does not know is answered with nothing.
  return hex(question.subarray(1)) === blob.id ? unhex(blob.blob) : new Uint8Array([0])
}

async function serve (stream) {
  const bytes = byteStream(stream)
  try {
    while (true) await writeMessage(bytes, answer(await readMessage(bytes)))
  } catch {} // The asker has closed the stream.
}

async function ask (peer, question) {
  const stream = await node.dialProtocol(peer, ASK, { runOnLimitedConnection: true })
  const bytes = byteStream(stream)
  await writeMessage(bytes, unhex(question))
  const answered = await readMessage(bytes)
  await stream.close()
  return hex(answered)
}

// What its hole punching says: it tells of its tries in no other way.
const punching = []
const unheard = Object.assign(() => {}, { error () {}, trace () {}, newScope: () => unheard })
const noted = Object.assign(said => punching.push(said), {
  ...unheard, error: (said, ...values) => punching.push(`failed: ${values.at(-1)}`)
})

const checked = await checkVectors()
const key = await generateKeyPairFromSeed('Ed25519', sha256(listen))
const node = await createLibp2p({
  start: false,
  logger: { forComponent: name => name === 'libp2p:dcutr' ? noted : unheard },
  privateKey: key,
  addresses: { listen: listen.split(','), announce: announce ? [announce] : [] },
  transports: [tcp(port ? { dialOpts: { localPort: Number(port) } } : {}), circuitRelayTransport()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: {
    identify: identify(),
    push: identifyPush(),
    ping: ping(),
    relay: circuitRelayServer(),
    dcutr: dcutr(),
    pubsub: gossipsub({ globalSignaturePolicy: 'StrictSign' }),
    // Without the mapper it keeps no loopback addresses.
    dht: kadDHT({ protocol: '/ipfs/kad/1.0.0', clientMode: false, peerInfoMapper: passthroughMapper })
  }
})
const { pubsub, dht } = node.services
await node.handle(ASK, serve, { runOnLimitedConnection: true })

const heard = new Set()
pubsub.addEventListener('message', async ({ detail }) => {
  try {
    const [,,,, sequence] = await open(detail.data, swarmId)
    heard.add(sequence)
    if (heard.size % 50 === 0) say({ heard: heard.size })
  } catch (error) { say({ refused: error.message }) }
})
// A relay that it is behind is met at the start.
const grafted = new Promise(resolve => pubsub.addEventListener('gossipsub:graft', resolve, { once: true }))
const identified = new Promise(resolve => node.addEventListener('peer:identify', resolve, { once: true }))
await node.start()
pubsub.subscribe(topic)
const { remotePeer } = await node.dial(multiaddr(address))
const { detail } = await identified
await grafted
await node.services.ping.ping(remotePeer).catch(error => {
  // Its own monitor pings at this moment, and ends the connection where no answer comes.
  if (error.name !== 'TooManyOutboundProtocolStreamsError') throw error
})
say({ me: node.peerId.toString(), checked, protocols: detail.protocols })

const cid = CID.createV1(0x55, multihash.create(0x12, sha256(`swarmd:${topic}`)))
const body = unhex(stored('rollouts').good[0].body)
let sequence = Date.now()
async function share (rollouts) {
  await pubsub.publish(topic, await seal(key, swarmId, sequence++, Date.now(), 'rollouts', rollouts))
}

const commands = {
  async publish (count) {
    for (let n = 0; n < count; n++) await share(body)
    return { published: count }
  },
  async share (rollouts) {
    await share(unhex(rollouts))
    return { shared: true }
  },
  async provide () {
    for await (const _ of dht.provide(cid)); // eslint-disable-line no-unused-vars
    return { provided: true }
  },
  async find () {
    const found = new Set()
    for await (const { providers } of dht.findProviders(cid, { signal: AbortSignal.timeout(20_000) })) {
      for (const { id } of providers ?? []) found.add(id.toString())
    }
    return { found: [...found] }
  },
  async ask (question) { return { answer: await ask(remotePeer, question) } },
  async askAt ([where, question]) {
    return { answer: await ask(multiaddr(where), question).catch(() => '') }
  },
  async connections () {
    const found = node.getConnections().map(({ remotePeer, remoteAddr }) => [remotePeer, remoteAddr].map(String))
    return { connections: found }
  },
  async addresses (of) {
    const { addresses } = await node.peerStore.get(peerIdFromString(of))
    return { addresses: addresses.map(({ multiaddr }) => String(multiaddr)) }
  },
  async punching () { return { punching } },
  async subscribers () { return { subscribers: pubsub.getSubscribers(topic).map(String) } },
  async reservations () { return { reservations: [...node.services.relay.reservations.keys()].map(String) } }
}
for await (const line of createInterface({ input: process.stdin })) {
  const { command, argument } = JSON.parse(line)
  say(await commands[command](argument))
}
await node.stop()
process.exit(0)
