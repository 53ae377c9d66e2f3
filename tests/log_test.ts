/** The log: its form, and that no secret gets into it. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { hide, redact, redactText } from "../redact.ts";
import { databaseTest as test, waitFor } from "./database.ts";
import { startWorker } from "./processes.ts";
import * as queue from "../queue.ts";

const P = "planted";

Deno.test("a text is logged without the secrets in it, and otherwise as it was", () => {
  const texts: Record<string, string> = {
    [`GET https://ann:${P}@host/path?page=2 failed`]: "GET https://…@host/path?page=2 failed",
    [`GET https://host/?page=2&access_token=${P}&x=1`]:
      "GET https://host/?page=2&access_token=…&x=1",
    [`https://host/#api-key=${P}`]: "https://host/#api-key=…",
    [`redis://:${P}@p@host:6379/0`]: "redis://…@host:6379/0",
    [`at postgres://u:${P} ${P}@[bad/x`]: "at postgres://…",
    [`Authorization: Bearer ${P}`]: "Authorization: …",
    [`"authorization":"Basic ${P}==" ok`]: `"authorization":… ok`,
    [`Authorization: Token ${P}, sent`]: "Authorization: …",
    [`Authorization: Digest username="ann", response="${P}"\nHost: h`]: "Authorization: …\nHost: h",
    [`cookie: theme=dark; siding_session=${P}; n=1`]: "cookie: …",
    [`headers: { authorization: [ 'Bearer ${P}' ], accept: 'a' }`]:
      "headers: { authorization: …, accept: 'a' }",
    [`Project-Access-Token: ${P}`]: "Project-Access-Token: …",
    [`sent bearer ${P}.123`]: "sent bearer …",
    [`{"password": "two ${P} words", "title": "Song"}`]: `{"password": …, "title": "Song"}`,
    [`{\\"secret\\":\\"${P}\\",\\"n\\":1}`]: `{\\"secret\\":…,\\"n\\":1}`,
    [`{"clientSecret":"${P}\\"${P}"}`]: `{"clientSecret":…}`,
    [`{"credentials":{"user":"ann","keys":{"a":"${P}"},"b":"${P}"},"n":1}`]:
      `{"credentials":…,"n":1}`,
    [`{"secrets":{"a":{"b":{"c":1},"d":"${P}"},"e":"${P}"}}`]: `{"secrets":…`,
    [`{"tokens":["${P}",["${P}"]],"n":1}`]: `{"tokens":…,"n":1}`,
    [`["x-api-key", "${P}"]`]: `["x-api-key", …]`,
    [`{ password => '${P}' }`]: "{ password => … }",
    [`password="never closed ${P}`]: "password=…",
    [`passwd='two ${P} words' user=ann`]: "passwd=… user=ann",
    [`SIDING_ADMIN_TOKEN=${P}`]: "SIDING_ADMIN_TOKEN=…",
    [`with eyJ${P}.eyJ${P}.${P}`]: "with …",
    [`key sk_live_${P}1234567890 used`]: "key … used",
    [`-----BEGIN RSA PRIVATE KEY-----\n${P}\n-----END RSA PRIVATE KEY----- end`]: "… end",
    "job 7 transcribe done after 1.2 s": "job 7 transcribe done after 1.2 s",
    "connect ECONNREFUSED 127.0.0.1:5432": "connect ECONNREFUSED 127.0.0.1:5432",
    "https://host/a@b?mail=a@b.c": "https://host/a@b?mail=a@b.c",
    "": "",
  };
  for (const [text, expected] of Object.entries(texts)) {
    assertEquals(redactText(text), expected);
  }
});

Deno.test("a secret that this process was given is hidden wherever it turns up", () => {
  hide("https://alerts.example/T0/planted-path?x=planted-query");
  hide("postgres://ann:pl%40nted-password@db:5432/d");
  hide("short");
  for (const secret of ["/T0/planted-path", "pl%40nted-password", "pl@nted-password"]) {
    assertEquals(redactText(`of ${secret}!`), "of …!");
  }
  assertEquals(redactText("a short word, and 'T0'"), "a short word, and 'T0'");
});

Deno.test("fields that are named like secrets are hidden, however deep, and others are not", () => {
  const names =
    "token accessToken x-api-key apikey API_KEY password userPassword passphrase secret " +
    "clientSecret authorization auth X-Auth accountKey Proxy-Authorization set-cookie credentials " +
    "privateKey private_key DATABASE_URL webhook_url SENTRY_DSN connectionString jwt";
  for (const name of names.split(" ")) {
    assertEquals(redact({ a: [{ [name]: P }] }), { a: [{ [name]: "…" }] });
    assertEquals(redact({ [name]: { inner: [P] } }), { [name]: "…" });
  }
  assertEquals(redact({ token: 12345678, password: null }), { token: "…", password: null });
  assertEquals(redact(new Headers({ "X-Api-Key": P, accept: "a" })), {
    "x-api-key": "…",
    accept: "a",
  });
  assertEquals(redact(new Map([["secret", P], ["b", "c"]])), { secret: "…", b: "c" });
  assertEquals(redact([["authorization", P], ["accept", "a"]]), [["authorization", "…"], [
    "accept",
    "a",
  ]]);
  assertEquals(redact([{ name: "token", value: P }]), [{ name: "token", value: "…" }]);
  assertEquals(
    redact(new URL(`https://a:${P}@host/?sig=1&token=${P}`)),
    "https://…@host/?sig=1&token=…",
  );
  assertEquals(redact(new TextEncoder().encode(P)), "[7 bytes]");
  const fine = {
    job: "7",
    kind: "band",
    title: "Song",
    key: "k1",
    attempt: 2,
    at: new Date(0),
    n: 7n,
  };
  assertEquals(redact(fine), { ...fine, at: "1970-01-01T00:00:00.000Z", n: "7" });
});

Deno.test("errors are logged with their stack, causes and fields, and without secrets", () => {
  const url = `https://ann:${P}@host/`;
  const inmost = Object.assign(new Error(`password=${P}`), { config: { headers: { cookie: P } } });
  const several = new AggregateError([new Error(`token: ${P}`)], `all of ${url}`, {
    cause: inmost,
  });
  const error = new Error(`no answer from ${url}`, { cause: several });
  const seen = JSON.stringify(redact(error));
  assert(!seen.includes(P), seen);
  assertStringIncludes(seen, "no answer from https://…@host/");
  assertStringIncludes(seen, "log_test.ts:", "the stack says where");
  for (const part of ['"cause":{', '"errors":[{', '"cookie":"…"', "token: …"]) {
    assertStringIncludes(seen, part);
  }
});

Deno.test("what cannot be read, goes round or goes too deep is logged all the same", () => {
  const round: Record<string, unknown> = { name: "a" };
  round.self = round;
  assertEquals(redact(round), { name: "a", self: "[circular]" });
  const bad = {
    get x() {
      throw new Error(P);
    },
  };
  assertEquals(redact({ bad, b: 1 }), { bad: "[unreadable]", b: 1 });
  let deep: unknown = P;
  for (let i = 0; i < 10_000; i++) deep = { deep };
  assert(JSON.stringify(redact(deep)).length < 200);
  const startedMs = performance.now();
  for (const part of ["token", "token:", '"token":{', '"token":[', '"token",', "cookie: ", "a"]) {
    redactText(part.repeat(20_000) + "\\".repeat(10_000));
  }
  assert(performance.now() - startedMs < 5000, "a long text takes no time");
});

/** Logs planted secrets in every way that code may. */
const PLANT = `
  const log = config.logger("worker");
  config.identify({ worker: "boot-1" });
  const error = new Error("no answer from https://ann:planted@host/", {
    cause: new Error("inner", { cause: { token: "planted" } }),
  });
  log.warn("job {job} sent {payload} by {password}: {error}", {
    job: "7", attempt: 2, level: "mine", message: "mine", payload: { api_key: "planted", title: "Song" },
    password: "planted", error, headers: new Headers({ authorization: "Bearer planted" }),
  });
  log.error\`with \${error} and \${{ secret: "planted" }}\`;
  log.info("and Authorization: Bearer planted");
`;

async function planted(env: Record<string, string>, end = "throw error;") {
  const config = new URL("../config.ts", import.meta.url);
  const path = await Deno.makeTempFile({ suffix: ".ts" });
  try {
    await Deno.writeTextFile(
      path,
      `
      import * as config from "${config}";
      await config.runMain("plant", async () => { await config.setUpLog("info"); ${PLANT} ${end} });`,
    );
    const { code, stderr } = await new Deno.Command(Deno.execPath(), {
      args: [
        "run",
        "-A",
        "--quiet",
        "--config",
        new URL("../deno.json", import.meta.url).pathname,
        path,
      ],
      env: { NO_COLOR: "1", ...env },
    }).output();
    assertEquals(code, 1);
    return new TextDecoder().decode(stderr);
  } finally {
    await Deno.remove(path);
  }
}

Deno.test("on Railway a log line is JSON, whose level, message, job, attempt and worker can be asked for", async () => {
  const said = await planted({ RAILWAY_ENVIRONMENT_ID: "e" });
  assert(!said.includes("planted"), said);
  const [, warn, error, info, last, ...more] = said.trim().split("\n").map((line) =>
    JSON.parse(line)
  );
  assertEquals(more, []);
  const { level, message, logger, job, attempt, worker, payload, headers } = warn;
  assertEquals({ level, logger, job, attempt, worker, payload, headers }, {
    ...{ level: "warn", logger: "siding.worker", job: "7", attempt: 2, worker: "boot-1" },
    ...{ payload: { api_key: "…", title: "Song" }, headers: { authorization: "…" } },
  });
  assertStringIncludes(
    message,
    'job 7 sent {"api_key":"…","title":"Song"} by …: Error: no answer from',
  );
  assertStringIncludes(message, "caused by: Error: inner");
  assertEquals([error.level, info.level, info.message], ["error", "info", "and Authorization: …"]);
  assertEquals([last.level, last.logger], ["error", "siding.plant"]);
  assertStringIncludes(last.message, "no answer from https://…@host/");
});

Deno.test("elsewhere it is a text for people", async () => {
  const said = await planted({});
  assert(!said.includes("planted"), said);
  assertMatch(said, /^\d\d:\d\d:\d\d\.\d{3} \[WRN\] siding·worker: job 7 sent \{"api_key":"…"/m);
  assertMatch(said, /^ +at .*\.ts:\d+/m);
  assertMatch(said, /^plant: no answer from https:\/\/…@host\/$/m);
});

for (const how of ["Promise.reject(error)", "setTimeout(() => { throw error; })"]) {
  Deno.test(`an error that nothing caught ends a script with 1 and is in its log, without secrets: ${how}`, async () => {
    const end = `${how}; await new Promise((resolve) => setTimeout(resolve, 60_000));`;
    const text = await planted({}, end);
    assertMatch(text, /^plant: uncaught: Error: no answer from [^]*inner/m);
    const json = await planted({ RAILWAY_ENVIRONMENT_ID: "e" }, end);
    const { level, message } = JSON.parse(json.trim().split("\n").at(-1)!);
    assertEquals(level, "error");
    assertMatch(message, /^uncaught: Error: no answer from https:\/\/…@host\/\n +at [^]*inner/);
    assert(!(text + json).includes("planted"), text + json);
  });
}

test(
  "a job's lines in the log name it, its attempt, its worker and its trace",
  async (sql, url) => {
    const traceId = "0af7651916cd43dd8448eb211c80319c";
    const trace_parent = `00-${traceId}-b7ad6b7169203331-01`;
    const [{ id }] = await queue.enqueue(sql, [
      { kind: "throws", payload: { message: `token=${P}`, permanent: true }, trace_parent },
    ]);
    await using worker = startWorker(url, [], [], {
      RAILWAY_ENVIRONMENT_ID: "e",
      RAILWAY_REPLICA_ID: "r",
    });
    const lines = () => worker.log().split("\n").slice(0, -1).map((line) => JSON.parse(line));
    const line = await waitFor(
      () => lines().find(({ job, message }) => job === id && / after /.test(message)),
      "the job to end",
    );
    const [row] = await sql`select boot_id from siding.processes where role = 'worker'`;
    const { level, attempt, worker: who, trace, kind } = line;
    assertEquals({ level, attempt, who, trace, kind }, {
      ...{ level: "warn", attempt: 1, who: row.boot_id, trace: traceId, kind: "throws" },
    });
    assert(!worker.log().includes(P), worker.log());
    assertStringIncludes(lines()[0].message, "settings: --database-url … ");
  },
);
