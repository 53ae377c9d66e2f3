/** The site with a database that does not answer, and with clients that mean it no good. */
import { assert, assertEquals, assertRejects } from "@std/assert";
import { createHmac } from "node:crypto";
import { startProxy } from "../dev/proxy.ts";
import { Problem } from "../web/problem.ts";
import { withJson } from "../web/uploads.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { OpenApiClient } from "./openapi_client.ts";
import { keyOf, type RunningSite, startSite } from "./site.ts";

test("while the database is silent every request is answered in time", async (_, url) => {
  await using proxy = startProxy(url);
  await using site = await startSite(proxy.url, ["--statement-limit-ms", "500"]);
  // By the document, which fails with an answer that it does not have.
  const api = await OpenApiClient.at(`${site.address}/api/openapi.json`, site.adminToken);
  const statusOf = async () => (await api.call("get", "/jobs")).status;
  assertEquals(await statusOf(), 200);
  proxy.silence();
  const startedMs = performance.now();
  const answers = await Promise.all(Array.from({ length: 100 }, statusOf));
  assertEquals(new Set(answers), new Set([503]));
  const tookMs = performance.now() - startedMs;
  assert(tookMs < 6000, `they took ${tookMs} ms`); // in turns of four it would be 12,500
  proxy.mend();
  await waitFor(async () => await statusOf() === 200, "the site to serve again");
});

/** Begins a request with a JSON body, of which only a part is sent. */
async function partOfRequest(site: RunningSite, path: string, key: string, bytes: number) {
  const { hostname, port } = new URL(site.address);
  const client = await Deno.connect({ hostname, port: Number(port) });
  const body = `{"kind": "echo", "payload": "`.padEnd(bytes, "x");
  const text = `POST ${path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${key}\r\n` +
    `Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n` +
    `Content-Length: ${bytes + 1}\r\n\r\n${body}`;
  const left = new TextEncoder().encode(text);
  for (let at = 0; at < left.length;) at += await client.write(left.subarray(at));
  return client;
}

test(
  "bodies that never end take a bounded memory, and leave no trace once they are gone",
  async (sql, url) => {
    await using site = await startSite(url);
    const key = await keyOf(sql, "ada");
    const clients: Deno.Conn[] = [];
    const answers: string[] = [];
    const hear = async (client: Deno.Conn) => {
      const buffer = new Uint8Array(1000);
      const n = await client.read(buffer).catch(() => null);
      if (n) answers.push(new TextDecoder().decode(buffer.subarray(0, n)).split("\r\n")[0]);
    };
    const heard = [];
    for (let i = 0; i < 60; i++) {
      const client = await partOfRequest(site, i % 2 ? "/mcp" : "/api/jobs", key, 1_150_000);
      clients.push(client);
      heard.push(hear(client));
    }
    // 64 MB are 55 of them.
    await waitFor(() => answers.length >= 5, "it to have enough");
    assertEquals(new Set(answers), new Set(["HTTP/1.1 503 Service Unavailable"]));
    const json = { "content-type": "application/json" };
    const init = { method: "POST", headers: json, body: '{"kind": "echo"}' };
    const small = await site.ask("/api/jobs", init);
    await small.body?.cancel();
    assertEquals(small.status, 201);
    for (const client of clients) client.close();
    await Promise.all(heard);
    assertEquals(/\[ERR\].*/.exec(site.log())?.[0], undefined);
  },
);

Deno.test("a client that sends nothing more of its JSON is told so", async () => {
  const body = new ReadableStream({ start: (it) => it.enqueue(new TextEncoder().encode("{")) });
  const request = new Request("http://localhost", { method: "POST", body });
  const error = await assertRejects(
    () => withJson(request, (it) => Promise.resolve(it), 100, 20),
    Problem,
  );
  assertEquals([error.status, error.message], [408, "nothing came for 0.02 s"]);
});

test("one who sends many forms slowly keeps nobody else from sending one", async (sql, url) => {
  await using site = await startSite(url);
  const [ada, bob] = [await keyOf(sql, "ada"), await keyOf(sql, "bob")];
  const slow: AbortController[] = [];
  const ended: Promise<void>[] = [];
  const answers: number[] = [];
  for (let i = 0; i < 34; i++) {
    const stop = new AbortController();
    slow.push(stop);
    const part = '--b\r\nContent-Disposition: form-data; name="kind"\r\n\r\nec';
    const body = new ReadableStream({ start: (it) => it.enqueue(new TextEncoder().encode(part)) });
    const headers = { "content-type": "multipart/form-data; boundary=b" };
    const init = { method: "POST", headers, body, signal: stop.signal, token: ada };
    ended.push(
      site.ask("/api/jobs", init).then(async (response) => {
        await response.body?.cancel();
        answers.push(response.status);
      }, () => {}),
    );
  }
  await waitFor(() => answers.length === 34 - 16, "all but 16 to be refused");
  assertEquals(new Set(answers), new Set([429]));
  const form = new FormData();
  form.append("kind", "echo");
  const response = await site.ask("/api/jobs", { method: "POST", body: form, token: bob });
  await response.body?.cancel();
  assertEquals(response.status, 201);
  for (const stop of slow) stop.abort();
  await Promise.all(ended);
});

test("malformed submissions count as submissions", async (_, url) => {
  await using site = await startSite(url, ["--submits-per-minute", "2"]);
  const submit = async (body: string) => {
    const headers = { "content-type": "application/json" };
    const response = await site.ask("/api/jobs", { method: "POST", headers, body });
    await response.body?.cancel();
    return response.status;
  };
  const bodies = ['{"kind": "sing"}', "[]", '{"kind": "echo"}'];
  const statuses = [];
  for (const body of bodies) statuses.push(await submit(body));
  assertEquals(statuses, [422, 422, 429]);
});

test("large submissions take a bounded memory, however many come at once", async (_, url) => {
  await using site = await startSite(url, ["--connections", "2"]);
  const payload = "x".repeat(1_000_000);
  const body = JSON.stringify({ kind: "echo", delay_s: 1000, payload });
  const headers = { "content-type": "application/json" };
  const answers = await Promise.all(Array.from({ length: 150 }, async () => {
    const response = await site.ask("/api/jobs", { method: "POST", headers, body });
    await response.body?.cancel();
    return response.status;
  }));
  assertEquals(new Set(answers), new Set([201, 503]));
  const peakMb = Number(
    /VmHWM:\s+(\d+) kB/.exec(Deno.readTextFileSync(`/proc/${site.pid}/status`))![1],
  ) / 1024;
  console.log(`      the site's peak was ${Math.round(peakMb)} MB`);
});

test("a form's token is no session, though the same secret signs both", async (sql, url) => {
  await using site = await startSite(url);
  await keyOf(sql, "ada");
  const secret = `a-session-secret-for-the-tests-only-01/${site.adminToken}`;
  const statusOf = async (value: string) => {
    const mac = createHmac("sha256", secret).update(value).digest("base64");
    const cookie = `siding_session=${encodeURIComponent(`${value}.${mac}`)}`;
    const response = await site.ask("/api/jobs", { token: null, headers: { cookie } });
    await response.body?.cancel();
    return response.status;
  };
  const expires = Math.floor(Date.now() / 1000) + 60;
  assertEquals(await statusOf(`1.${expires}.a-b`), 200);
  for (const value of [`csrf 1.${expires}.a-b`, `link ${expires}`, `1.${expires - 120}.a-b`]) {
    assertEquals(await statusOf(value), 401, value);
  }
});
