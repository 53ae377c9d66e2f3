/** Uploads to the site: how large, of what type, and what is left of one that comes to nothing. */
import { assertEquals, assertLess, assertStringIncludes } from "@std/assert";
import { databaseTest as test, waitFor } from "./database.ts";
import { clientOf, formOf } from "./openapi_client.ts";
import { count, keyOf, startSite } from "./site.ts";

test(
  "too large is 413, another type 415, a form that breaks off 400; nothing is left of them",
  async (sql, url) => {
    await using site = await startSite(url, ["--max-file-bytes", "1500000"]);
    const api = await clientOf(site, await keyOf(sql, "ada"));
    const large = new Uint8Array(3_000_000);
    const statusOf = async (request: Parameters<typeof api.call>[2]) => {
      const { status, body } = await api.call("post", "/jobs", request);
      return [status, body.detail];
    };
    assertEquals(
      await statusOf({ form: formOf({ kind: "echo" }, ["ok.wav", "x"], ["a.wav", large]) }),
      [
        413,
        "a.wav is larger than 1500000 bytes (SIDING_MAX_FILE_BYTES)",
      ],
    );
    const long = "x".repeat(1_300_000);
    const json = await statusOf({ json: { kind: "echo", payload: long } });
    assertEquals(json, [413, "the body is larger than 1200000 bytes; a file may be larger"]);
    const field = await statusOf({ form: formOf({ kind: "echo", payload: `"${long}"` }) });
    assertEquals(field, [413, "the fields are larger than 1200000 bytes; a file may be larger"]);
    const [status, detail] = await statusOf({ odd: { body: "<job/>", type: "application/xml" } });
    assertEquals(status, 415);
    assertStringIncludes(detail, "application/xml");
    const type = "multipart/form-data; boundary=b";
    const part = '--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n';
    assertEquals((await statusOf({ odd: { body: `${part}bytes`, type } }))[0], 400);
    assertEquals([await count(sql, "jobs"), await count(sql, "files")], [0, 0]);
  },
);

const BOUNDARY = "siding-test";
const head = (name: string) =>
  `--${BOUNDARY}\r\nContent-Disposition: form-data; name="kind"\r\n\r\ncopy\r\n` +
  `--${BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="${name}"\r\n\r\n`;

/** The bytes of a form with one file, made as they are read. */
function largeForm(bytes: number): ReadableStream<Uint8Array> {
  const encoder = new TextEncoder();
  const piece = new Uint8Array(65_536).fill(7);
  return ReadableStream.from((function* () {
    yield encoder.encode(head("large.wav"));
    for (let sent = 0; sent < bytes; sent += piece.length) yield piece;
    yield encoder.encode(`\r\n--${BOUNDARY}--\r\n`);
  })());
}

test(
  "an upload of 100 MB, and its download, do not grow the site's memory by its size",
  async (sql, url) => {
    await using site = await startSite(url);
    const api = await clientOf(site, await keyOf(sql, "ada"));
    const type = `multipart/form-data; boundary=${BOUNDARY}`;
    const peakMb = () => {
      const status = Deno.readTextFileSync(`/proc/${site.pid}/status`);
      return Number(/VmHWM:\s+(\d+) kB/.exec(status)![1]) / 1024;
    };
    /** Sends a file there and back. */
    const roundTrip = async (bytes: number) => {
      const odd = { body: largeForm(bytes), type };
      const { body: { id } } = await api.call("post", "/jobs", { odd });
      const { body: job } = await api.call("get", "/jobs/{id}", { with: { id } });
      const { response } = await api.call("get", "/jobs/{id}/files/{file_id}", {
        with: { id, file_id: job.inputs[0].id },
      });
      let got = 0;
      for await (const piece of response.body!) got += piece.length;
      assertEquals([job.inputs[0].bytes, got], [bytes, bytes]);
    };
    // What is compiled for the first one, and some of what the garbage collector lets lie, which was
    // 110 MB in all after 100 MB, and no more after 400 MB.
    await roundTrip(480 * 65_536);
    const beforeMb = peakMb();
    await roundTrip(1600 * 65_536);
    const grownMb = peakMb() - beforeMb;
    console.log(`      the site's peak grew by ${Math.round(grownMb)} MB`);
    assertLess(grownMb, 100);
  },
);

test("an upload that breaks off on the way leaves no job and no file", async (sql, url) => {
  await using site = await startSite(url);
  const key = await keyOf(sql, "ada");
  const { hostname, port } = new URL(site.address);
  const connection = await Deno.connect({ hostname, port: Number(port) });
  const encoder = new TextEncoder();
  const send = async (bytes: Uint8Array) => {
    for (let sent = 0; sent < bytes.length;) sent += await connection.write(bytes.subarray(sent));
  };
  await send(encoder.encode(
    `POST /api/jobs HTTP/1.1\r\nHost: ${hostname}\r\nAuthorization: Bearer ${key}\r\n` +
      `Content-Type: multipart/form-data; boundary=${BOUNDARY}\r\nContent-Length: 9000000\r\n\r\n${
        head("a.wav")
      }`,
  ));
  await send(new Uint8Array(2_500_000));
  await waitFor(async () => await count(sql, "file_chunks") > 1, "a part of it to be stored");
  connection.close();
  await waitFor(async () => await count(sql, "files") === 0, "the part to be removed");
  assertEquals([await count(sql, "jobs"), await count(sql, "file_chunks")], [0, 0]);
});
