/**
 * `deno task test`: the whole suite. On the server of DATABASE_URL_TEST if that is set; otherwise
 * on an embedded PostgreSQL 18, and what depends on the server once more: on each one that is
 * installed (Debian's packages), through PgBouncer in transaction mode if that is; where only
 * PgBouncer is, on the embedded one through it.
 *
 * Arguments go on to `deno test`: `deno task test tests/queue_test.ts --filter claim`. The last
 * line is `N passed, N failed`, with `, N skipped` if any were. Exits 1 when a test failed, when
 * none ran, or when `deno test` failed for any other reason (counted as one failed); else 0.
 *
 * The tests run real processes, two files at once, and some have a time limit that a machine busy with
 * others can miss. So up to {@linkcode MOST_AGAIN} tests that failed run again, by themselves and on
 * nothing of before. What passes then counts as passed, and is named above the last line with what it
 * failed of: it is unsteady, and to be looked at. What fails again has failed.
 */
import { tmpdir } from "node:os";
import { basename } from "node:path";
import postgres from "postgres";
import { installedPostgres, type PostgresOptions, startPostgres } from "../dev/postgres.ts";
import { pgbouncerVersion, startPgBouncer } from "./pgbouncer.ts";

/**
 * Test files that run at once. More than the two cores of CI make tests with time limits
 * unsteady.
 */
const JOBS = 2;

/** Tests of what another server, or a pooler before it, could do differently: these run once more. */
const SERVER_DEPENDENT = [
  "claim_test.ts",
  "controller_test.ts",
  "credits_test.ts",
  "files_test.ts",
  "migrate_test.ts",
  "plans_test.ts",
  "queue_test.ts",
  "worker_test.ts",
];

/** Failures that are tried again; with more of them it is not the machine. */
const MOST_AGAIN = 5;

/** The second run's servers: those installed; the embedded one where there is but a pooler to it. */
function others(): PostgresOptions[] {
  const installed = installedPostgres().map(({ binDir }) => ({ binDir }));
  return installed.length === 0 && pgbouncerVersion !== null ? [{}] : installed;
}

/** Each test has a database, and so a pool of its own; idle connections go back to the server soon. */
const POOLER = { default_pool_size: 20, max_client_conn: 2000, server_idle_timeout: 2 };

/** How the report joins the name of a step to that of its test. */
const STEP = " &gt; ";

/** What came of some test files. */
export interface Counts {
  passed: number;
  failed: number;
  skipped: number;
  /** The failures, each with its file, name and error. */
  failures: Failure[];
}

export interface Failure {
  file: string;
  name: string;
  error: string;
}

async function main(args: string[]): Promise<number> {
  const isFile = (arg: string) => arg.endsWith("_test.ts");
  const flags = args.filter((arg) => !isFile(arg));
  const files = args.some(isFile) ? args.filter(isFile) : testFiles();
  const counts: Counts[] = [];

  const given = Deno.env.get("DATABASE_URL_TEST");
  if (given) {
    counts.push(await runTwice(given, files, flags));
  } else {
    {
      await using server = await startPostgres();
      counts.push(await runTwice(server.url, files, flags));
    }
    const dependent = files.filter((file) => SERVER_DEPENDENT.includes(basename(file)));
    for (const options of dependent.length ? others() : []) {
      await using server = await startPostgres(options);
      await using pooler = pgbouncerVersion !== null
        ? await startPgBouncer(server.url, POOLER)
        : null;
      counts.push(await runTwice(server.url, dependent, flags, pooler?.url));
    }
  }

  const sum = (key: "passed" | "failed" | "skipped") =>
    counts.reduce((total, count) => total + count[key], 0);
  const [passed, failed, skipped] = [sum("passed"), sum("failed"), sum("skipped")];
  for (const { file, name, error } of counts.flatMap(({ failures }) => failures)) {
    console.log(`\n${file} => ${name}\n${error}`);
  }
  if (passed + failed === 0) console.log("No test ran");
  console.log(`${passed} passed, ${failed} failed` + (skipped ? `, ${skipped} skipped` : ""));
  return failed || !passed ? 1 : 0;
}

/** Runs the files, and what failed once more. */
async function runTwice(
  url: string,
  files: string[],
  flags: string[],
  pooled?: string,
): Promise<Counts> {
  const counts = await runOn(url, files, flags, pooled);
  const { failures } = counts;
  if (failures.length === 0 || failures.length > MOST_AGAIN) return counts;
  if (flags.some((flag) => flag.startsWith("--filter"))) return counts; // there is but one
  console.log(`\nWhat failed runs again, by itself`);
  const names = failures.map(({ name }) => name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  // In all files: a test that a helper registers is of the helper's file, as the report has it.
  const again = await runOn(url, files, [...flags, `--filter=/^(${names.join("|")})$/`], pooled, 1);
  if (again.passed + again.failed !== failures.length) return counts;
  for (const failure of failures) {
    if (again.failures.some(({ name }) => name === failure.name)) continue;
    failure.name += " (UNSTEADY: it passed when it ran again by itself)";
    counts.failed--;
    counts.passed++;
  }
  return counts;
}

/** Runs the files in one `deno test` on the server at `url`, and says what came of it. */
async function runOn(
  url: string,
  files: string[],
  flags: string[],
  pooledUrl = "",
  jobs = JOBS,
): Promise<Counts> {
  const through = pooledUrl && `, through PgBouncer ${pgbouncerVersion}`;
  console.log(`\n${files.length} test files on PostgreSQL ${await versionOf(url)}${through}`);
  // For all that the tests and their processes leave, killed ones too; open to any user, since
  // servers that root starts run as another.
  const folder = await Deno.makeTempDir({ prefix: "siding-" });
  await Deno.chmod(folder, 0o1777);
  const report = `${folder}/report.xml`;
  try {
    const { code } = await new Deno.Command(Deno.execPath(), {
      args: [
        ...["test", "-A", "--frozen", "--parallel", "--sanitize-ops", "--sanitize-resources"],
        ...[`--junit-path=${report}`, ...flags, ...files],
      ],
      env: {
        ...{ DATABASE_URL_TEST: url, DATABASE_URL_TEST_POOLED: pooledUrl },
        ...{ DENO_JOBS: String(jobs), TMPDIR: folder },
        // Pictures of the pages are to be looked at after all else is removed.
        SIDING_ARTIFACTS: Deno.env.get("SIDING_ARTIFACTS") || `${tmpdir()}/siding-pages`,
      },
    }).spawn().status;
    const counts = countsOf(await Deno.readTextFile(report));
    if (code !== 0 && counts.failed === 0) {
      console.log(
        `deno test ended with exit code ${code} though no test failed: counted as failed`,
      );
      counts.failed = 1; // of no file, so that nothing runs again
    }
    return counts;
  } finally {
    await Deno.remove(folder, { recursive: true });
  }
}

/**
 * Counts the tests in a JUnit report, as Deno's own summary does: without the steps, which are
 * `<test> > <step>`, and without those that a filter left out, which have no time.
 */
export function countsOf(report: string): Counts {
  const counts: Counts = { passed: 0, failed: 0, skipped: 0, failures: [] };
  for (const [suite, file] of report.matchAll(/<testsuite name="([^"]*)".*?<\/testsuite>/gs)) {
    const cases = [...suite.matchAll(/<testcase name="([^"]*)"([^>]*)>(.*?)<\/testcase>/gs)];
    const names = new Set(cases.map(([, name]) => name));
    for (const [, name, attributes, content] of cases) {
      const parent = name.slice(0, Math.max(0, name.lastIndexOf(STEP)));
      if (names.has(parent) || !attributes.includes(" time=")) continue;
      const outcome = content.trimStart();
      if (outcome.startsWith("<skipped")) counts.skipped++;
      else if (outcome.startsWith("<failure") || outcome.startsWith("<error")) {
        counts.failed++;
        const error = text(outcome.replace(/<[^>]*>/g, "")).trim().slice(0, 2000);
        counts.failures.push({ file: file.replace(/^\.\//, ""), name: text(name), error });
      } else counts.passed++;
    }
  }
  return counts;
}

/** What XML writes with entities. */
const text = (xml: string) =>
  xml.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&quot;", '"')
    .replaceAll("&apos;", "'").replaceAll("&amp;", "&");

async function versionOf(url: string): Promise<string> {
  const sql = postgres(url, { max: 1 });
  try {
    const [{ server_version }] = await sql`show server_version`;
    return server_version;
  } finally {
    await sql.end();
  }
}

function testFiles(): string[] {
  return [...Deno.readDirSync("tests")].map(({ name }) => name)
    .filter((name) => name.endsWith("_test.ts")).sort().map((name) => `tests/${name}`);
}

if (import.meta.main) Deno.exit(await main(Deno.args));
