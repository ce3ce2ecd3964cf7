// What the scripts for Node share: the server, and how they say what worked.
export const URL_ = process.env.CLIENT_URL; // without a path
export const MODEL = process.env.CLIENT_MODEL;
export const KEY = process.env.CLIENT_KEY;
export const QUESTION = "What is the capital of France?";
export const WEATHER = "How much rain fell in Rome?";
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};

// Prints whether the function worked, as a line of JSON.
export async function test(name, does) {
  let error = null;
  try {
    await does();
  } catch (thrown) {
    console.error(thrown);
    error = `${thrown?.name}: ${thrown?.message}`.replace(/\s+/g, " ").slice(0, 300);
  }
  // What clients print may end without an end of its line.
  console.log(`\n${JSON.stringify({ case: name, error })}`);
}

export function expect(true_, said) {
  if (!true_) throw new Error(`not expected: ${JSON.stringify(said)}`);
}

export function city(text) {
  expect(["Rome", "Oslo"].includes(JSON.parse(text).city), text);
}
