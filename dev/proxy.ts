/**
 * A TCP proxy before a database or a service, which tests and the chaos tool can cut, let fall
 * silent, or listen at.
 */

export interface Proxy extends AsyncDisposable {
  /** The target's URL by way of the proxy. */
  url: string;
  /** Closes all connections and refuses new ones, as a server that is down. */
  cut(): void;
  /** Closes all connections, and takes new ones. */
  reset(): void;
  /** Keeps all connections and swallows what comes, as a peer that is gone without a word. */
  silence(): void;
  /** Passes everything on again. Connections that fell silent stay so. */
  mend(): void;
  /** Lets each connection fall silent that sends this text, from then on. */
  silenceThatSay(text: string): void;
  /** Passes on the statement with this text in it, and swallows what comes back for its execution. */
  swallowReplyTo(text: string): void;
  /** Passes on the statement with this text in it, and keeps what comes back for its execution. */
  holdReplyTo(text: string): Hold;
}

export interface Hold {
  /** Resolves when there is a reply, which is kept. */
  held: Promise<void>;
  release(): void;
}

/** Told of each piece that is to be passed on; false: it is not. */
export type Tap = (from: "client" | "server", bytes: Uint8Array) => boolean;

/** Starts a proxy to the host and port of `url`. */
export function startProxy(url: string, tap: Tap = () => true): Proxy {
  const target = new URL(url);
  const connections = new Set<Deno.Conn>();
  let listener = Deno.listen({ hostname: "127.0.0.1", port: 0 });
  const { port } = listener.addr as Deno.NetAddr;
  let silent = false;
  let unwanted = "";
  /** The statement whose reply is to be kept from its client, and how. */
  let trigger: { text: string; gate: Promise<boolean>; onReply: () => void } | null = null;
  let tasks: Promise<unknown>[] = [];

  const close = (conn: Deno.Conn) => {
    if (connections.delete(conn)) conn.close();
  };
  /** Passes on what `onPiece` does not keep back. */
  const pass = async (
    from: Deno.Conn,
    to: Deno.Conn,
    onPiece: (bytes: Uint8Array) => boolean | Promise<boolean>,
  ) => {
    const buffer = new Uint8Array(65_536);
    try {
      for (let n = await from.read(buffer); n !== null; n = await from.read(buffer)) {
        if (!await onPiece(buffer.subarray(0, n))) continue;
        for (let at = 0; at < n;) at += await to.write(buffer.subarray(at, n));
      }
    } catch {
      // Closed on one side: the other follows.
    }
    for (const conn of [from, to]) close(conn);
  };
  const serve = async (client: Deno.Conn) => {
    let upstream: Deno.Conn;
    try {
      upstream = await Deno.connect({ hostname: target.hostname, port: Number(target.port) });
    } catch {
      return close(client); // the target is down
    }
    connections.add(upstream);
    if (!connections.has(client)) return close(upstream); // cut meanwhile
    let mute = false;
    // The driver first has a statement described; what executes it is its next message.
    let described: typeof trigger = null;
    let executing: typeof trigger = null;
    await Promise.all([
      pass(client, upstream, (bytes) => {
        const text = unwanted || trigger ? new TextDecoder().decode(bytes) : "";
        mute ||= silent || (unwanted !== "" && text.includes(unwanted));
        if (mute) return false;
        executing ??= described;
        if (trigger && text.includes(trigger.text)) [described, trigger] = [trigger, null];
        return tap("client", bytes);
      }),
      pass(upstream, client, (bytes) => {
        mute ||= silent;
        if (mute) return false;
        if (!executing) return tap("server", bytes);
        executing.onReply();
        return executing.gate;
      }),
    ]);
  };
  const accept = async (server: Deno.TcpListener) => {
    for await (const client of server) {
      connections.add(client);
      tasks.push(serve(client));
    }
  };
  tasks.push(accept(listener));

  const proxied = new URL(url);
  proxied.port = String(port);
  proxied.hostname = "127.0.0.1";
  let listening = true;
  const reset = () => {
    for (const conn of [...connections]) close(conn);
  };
  const cut = () => {
    if (listening) listener.close();
    listening = false;
    reset();
  };
  const releases: (() => void)[] = [];
  return {
    url: proxied.href,
    cut,
    reset,
    silence: () => silent = true,
    silenceThatSay: (text) => unwanted = text,
    swallowReplyTo: (text) => {
      trigger = { text, gate: Promise.resolve(false), onReply: () => {} };
    },
    holdReplyTo(text) {
      const gate = Promise.withResolvers<boolean>();
      const replied = Promise.withResolvers<void>();
      trigger = { text, gate: gate.promise, onReply: replied.resolve };
      const release = () => gate.resolve(true);
      releases.push(release);
      return { held: replied.promise, release };
    },
    mend() {
      silent = false;
      unwanted = "";
      if (listening) return;
      listener = Deno.listen({ hostname: "127.0.0.1", port });
      listening = true;
      tasks.push(accept(listener));
    },
    async [Symbol.asyncDispose]() {
      cut();
      for (const release of releases) release();
      await Promise.all(tasks);
      tasks = [];
    },
  };
}
