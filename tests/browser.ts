/** A real browser for the tests of the pages: Debian's Chromium, driven by playwright-core. */
import { assertEquals } from "@std/assert";
import { type Browser, type BrowserContextOptions, chromium, type Page } from "playwright-core";
import type { Pool } from "../db.ts";
import { databaseTest } from "./database.ts";
import { adminToken, type RunningSite, startSite } from "./site.ts";

const PATH = "/usr/bin/chromium";
const isThere = (() => {
  try {
    return Deno.statSync(PATH).isFile;
  } catch {
    return false;
  }
})();
const flags = [
  ...["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"],
  ...["--disable-background-networking", "--disable-component-update", "--disable-sync"],
];

/** What a test of pages gets: a site on a database of its own, and windows of a browser on it. */
export interface Windows {
  site: RunningSite;
  sql: Pool;
  url: string;
  /** A window of somebody who signed in with `token`, the admin's if not given, or did not: null. */
  open(options?: BrowserContextOptions & { token?: string | null }): Promise<Page>;
  /** What the windows had to complain of so far: errors of scripts, and what the policy forbade. */
  complaints: string[];
}

/**
 * A test with a browser. At its end the windows must have had no complaint. Without Chromium it is
 * skipped, and its name says why.
 */
export function browserTest(
  name: string,
  body: (windows: Windows) => Promise<void>,
  siteArgs: string[] = [],
): void {
  if (!isThere) {
    const why = `skipped: there is no ${PATH}, which apt-get install chromium brings`;
    return Deno.test({ name: `${name} (${why})`, ignore: true, fn: () => {} });
  }
  databaseTest(name, async (sql, url) => {
    await using site = await startSite(url, siteArgs);
    const browser = await chromium.launch({ executablePath: PATH, args: flags });
    const complaints: string[] = [];
    try {
      const open: Windows["open"] = (options) => openWindow(browser, site, complaints, options);
      await body({ site, sql, url, open, complaints });
    } finally {
      await browser.close();
    }
    assertEquals(complaints, []);
  });
}

async function openWindow(
  browser: Browser,
  site: RunningSite,
  complaints: string[],
  { token = adminToken, ...options }: BrowserContextOptions & { token?: string | null } = {},
): Promise<Page> {
  const context = await browser.newContext({ baseURL: site.address, ...options });
  const page = await context.newPage();
  page.on("pageerror", (error) => complaints.push(`${page.url()}: ${error.message}`));
  page.on("dialog", async (dialog) => {
    complaints.push(`${page.url()}: a dialog that says ${dialog.message()}`);
    await dialog.dismiss();
  });
  page.on("console", (message) => {
    // That a page was not found, or not allowed, is what some tests are about.
    if (message.type() !== "error" || /^Failed to load resource/.test(message.text())) return;
    complaints.push(`${page.url()}: ${message.text()}`);
  });
  if (token !== null) await signIn(page, token);
  return page;
}

export async function signIn(page: Page, token: string): Promise<void> {
  await page.goto("/sign-in");
  await page.getByLabel("Admin token or API key").fill(token);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByRole("button", { name: "Sign out" }).waitFor();
}
